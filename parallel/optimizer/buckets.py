"""Buckets: parameters end to end in flat memory, so that one collective and one kernel serve many of them.

A bucket holds parameters of one dtype, weight decay and set of partial axes. The parameters become views of `values`, their
summed gradients are views of `gradients`. With d ranks in the data-parallel shard group the flat memory is padded to d equal
shards: rank r owns elements [r·n/d, (r+1)·n/d), and keeps float32 master weights and Adam's moments of these only. Shard
boundaries may fall inside a parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from parallel.layout import Box, GlobalBox, layout_of
from parallel.mesh import Axis, Mesh


@dataclass(frozen=True)
class ShardBox(GlobalBox):
    """A box of a global tensor inside this rank's shard of a bucket."""

    start: int  # of its first element in the shard, where it is contiguous
    saved: bool  # whether this rank, among those with a replica of the box, writes it to checkpoints

    def view(self, shard: Tensor) -> Tensor:
        """The box in a flat shard."""
        return shard[self.start : self.start + math.prod(self.sizes)].view(self.sizes)


@dataclass
class Slot:
    """A parameter in a bucket."""

    name: str
    parameter: nn.Parameter
    start: int  # of its first element in the bucket
    gradient: Tensor = field(init=False)  # its view of the bucket's gradients
    filled: bool = False  # whether `gradient` holds a gradient of this step


class Bucket:
    """Flat memory of some parameters; see the module docstring.

    Args:
        named_parameters: moved into the bucket, of which they become views.
        mesh: its data-parallel shard group shards the bucket, if `shard`.
        weight_decay: of all of them.
        partial: axes over which their gradients are partial sums (`Layout.partial_axes`).
        gradient_dtype: of the summed gradients.
    """

    def __init__(
        self,
        named_parameters: list[tuple[str, nn.Parameter]],
        mesh: Mesh,
        weight_decay: float,
        partial: tuple[str, ...],
        shard: bool,
        gradient_dtype: torch.dtype,
    ) -> None:
        self.mesh, self.weight_decay = mesh, weight_decay
        self.axis = mesh.dp_shard if shard else Axis("dp_shard")
        self.partial: list[Axis] = [getattr(mesh, name) for name in partial]
        self.slots: list[Slot] = []
        numel = 0
        for name, parameter in named_parameters:
            self.slots.append(Slot(name, parameter, numel))
            numel += parameter.numel()
        first = named_parameters[0][1]
        padded = math.ceil(numel / self.axis.size) * self.axis.size
        self.values = torch.zeros(padded, dtype=first.dtype, device=first.device)
        self.gradients = torch.zeros(padded, dtype=gradient_dtype, device=first.device)
        for slot in self.slots:
            parameter, stop = slot.parameter, slot.start + slot.parameter.numel()
            view = self.values[slot.start : stop].view_as(parameter)
            view.copy_(parameter.detach())
            parameter.data = view
            slot.gradient = self.gradients[slot.start : stop].view_as(parameter)
        self.length = padded // self.axis.size  # of the shard
        self.first = self.axis.rank * self.length
        shard_values = self.local_shard(self.values)
        self.master = shard_values if shard_values.dtype == torch.float32 else shard_values.float()
        self.exp_avg = torch.zeros_like(self.master)
        self.exp_avg_sq = torch.zeros_like(self.master)
        self.segments = self._segments()

    def local_shard(self, flat: Tensor) -> Tensor:
        """This rank's shard of a flat tensor, as a view."""
        return flat[self.first : self.first + self.length]

    def _segments(self) -> list[tuple[int, int, float]]:
        """Ranges (start, stop, weight) of the shard without padding; weights 1 / replicas count each element once."""
        copies = self.mesh.dp_shard.size // self.axis.size  # of an unsharded bucket
        shared = math.prod(axis.size for axis in self.partial if axis.name == "embedding")
        segments: list[tuple[int, int, float]] = []
        for start, box in self._local_boxes():
            low, high = max(start, 0), min(start + math.prod(box.sizes), self.length)
            weight = 1 / (box.replicas * copies * shared)
            if low < high:
                if segments and segments[-1][1:] == (low, weight):
                    low = segments.pop()[0]
                segments.append((low, high, weight))
        return segments

    def square_norm(self, shard: Tensor) -> Tensor:
        """This rank's term of a squared norm, 0-dim float32; summed over all ranks, each element counts once."""
        wide = torch.float32
        norms = [torch.linalg.vector_norm(shard[a:b], dtype=wide).square() * w for a, b, w in self.segments]
        return torch.stack(norms).sum() if norms else shard.new_zeros((), dtype=wide)

    def boxes(self) -> Iterator[ShardBox]:
        """The boxes of global tensors in this rank's shard, without padding."""
        first_copy = self.axis.size > 1 or self.mesh.dp_shard.rank == 0
        first_stage = all(axis.rank == 0 for axis in self.partial if axis.name == "embedding")
        for begin, box in self._local_boxes():
            saved = first_copy and first_stage and box.replica == 0
            low, high = max(0, -begin), min(math.prod(box.sizes), self.length - begin)
            for start, offsets, sizes in split_range(box.sizes, low, high):
                offsets = tuple(a + b for a, b in zip(box.offsets, offsets, strict=True))
                yield ShardBox(box.name, box.shape, offsets, sizes, begin + start, saved)

    def _local_boxes(self) -> Iterator[tuple[int, Box]]:
        """The boxes of all parameters, each with the position of its first element relative to this rank's shard."""
        for slot in self.slots:
            row = slot.parameter.shape[1:]
            for box in layout_of(slot.parameter).boxes(slot.name, self.mesh.tensor.rank):
                assert box.sizes[1:] == tuple(row), "only rows are padded, so a box is contiguous"
                yield slot.start - self.first + box.local_offsets[0] * math.prod(row), box


def split_range(
    shape: tuple[int, ...], low: int, high: int
) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Cut elements [low, high) of a row-major tensor into contiguous boxes: (first element, offsets, sizes).

    A matrix yields at most three: the end of a row, complete rows, the beginning of a row.
    """
    if len(shape) == 1:
        if low < high:
            yield low, (low,), (high - low,)
        return
    width = math.prod(shape[1:])
    zeros = (0,) * (len(shape) - 1)
    while low < high:
        row, column = divmod(low, width)
        if column == 0 and high - low >= width:
            rows = (high - low) // width
            yield low, (row, *zeros), (rows, *shape[1:])
            low += rows * width
        else:
            stop = min(high, (row + 1) * width)
            for start, offsets, sizes in split_range(shape[1:], column, stop - row * width):
                yield row * width + start, (row, *offsets), (1, *sizes)
            low = stop
