"""Buckets: parameters laid end to end in flat memory, so that one collective and one kernel serve many of them.

A bucket holds parameters of one type that are treated alike. The parameters become views of `values`, their gradients are
gathered in `gradients`. Over d ranks of the zero axis the flat memory is padded to d equal shards; rank r owns
[r·n/d, (r+1)·n/d) and keeps the float32 master weights and Adam's moments of that range alone; a shard need not end
where a parameter does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from parallel.layout import layout_of
from parallel.mesh import Axis, Mesh


@dataclass(frozen=True)
class ShardBox:
    """A box of a global tensor that lies in this rank's shard of a bucket.

    Attributes:
        name: of the global tensor.
        shape: of the global tensor.
        offsets, sizes: the box, in global coordinates.
        start: where its first element lies in the shard; the box is contiguous there.
        saved: whether this rank is the one of its replicas that writes it.
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    saved: bool

    def of(self, shard: Tensor) -> Tensor:
        """The view of the box in a flat shard."""
        return shard[self.start : self.start + math.prod(self.sizes)].view(self.sizes)


@dataclass
class Slot:
    """A parameter's place in a bucket."""

    name: str
    parameter: nn.Parameter
    start: int
    gradient: Tensor = field(init=False)  # its view of the bucket's gradients
    filled: bool = False  # whether this step's gradient has begun to be summed


class Bucket:
    """Flat memory for some parameters, see the module's text.

    Args:
        named: parameters with their names; they are moved into the bucket and become views of it.
        mesh: whose zero axis shards the bucket, if `shard`.
        decay: the weight decay that all of them get.
        partial: axes over which their gradients are partial (`Layout.partial`).
        gradient_dtype: of the summed gradients.
    """

    def __init__(
        self,
        named: list[tuple[str, nn.Parameter]],
        mesh: Mesh,
        decay: float,
        partial: tuple[str, ...],
        shard: bool,
        gradient_dtype: torch.dtype,
    ) -> None:
        self.mesh, self.decay = mesh, decay
        self.axis = mesh.zero if shard else Axis("zero")
        self.partial: list[Axis] = [getattr(mesh, name) for name in partial]
        self.slots: list[Slot] = []
        end = 0
        for name, parameter in named:
            self.slots.append(Slot(name, parameter, end))
            end += parameter.numel()
        first = named[0][1]
        size = math.ceil(end / self.axis.size) * self.axis.size
        self.values = torch.zeros(size, dtype=first.dtype, device=first.device)
        self.gradients = torch.zeros(size, dtype=gradient_dtype, device=first.device)
        for slot in self.slots:
            parameter, stop = slot.parameter, slot.start + slot.parameter.numel()
            home = self.values[slot.start : stop].view_as(parameter)
            home.copy_(parameter.detach())
            parameter.data = home
            slot.gradient = self.gradients[slot.start : stop].view_as(parameter)
        self.length = size // self.axis.size
        self.first = self.axis.rank * self.length
        own = self.own(self.values)
        self.master = own if own.dtype == torch.float32 else own.float()
        self.exp_avg = torch.zeros_like(self.master)
        self.exp_avg_sq = torch.zeros_like(self.master)
        self.segments = self._segments()

    def own(self, flat: Tensor) -> Tensor:
        """This rank's shard of a flat tensor, as a view."""
        return flat[self.first : self.first + self.length]

    def _segments(self) -> list[tuple[int, int, float]]:
        """Ranges (start, stop, weight) of the shard, padding left out; with weight 1 / replicas each element counts once."""
        copies = self.mesh.zero.size // self.axis.size  # of an unsharded bucket
        shared = math.prod(axis.size for axis in self.partial if axis.name == "ends")
        segments: list[tuple[int, int, float]] = []
        for slot in self.slots:
            width = math.prod(slot.parameter.shape[1:])
            for box in layout_of(slot.parameter).boxes(slot.name, self.mesh.tensor.rank):
                start = slot.start - self.first + box.local_offsets[0] * width
                low, high = max(start, 0), min(start + math.prod(box.sizes), self.length)
                weight = 1 / (box.replicas * copies * shared)
                if low < high:
                    if segments and segments[-1][1:] == (low, weight):
                        low = segments.pop()[0]
                    segments.append((low, high, weight))
        return segments

    def gradient_square_norm(self) -> Tensor:
        """This rank's part of the squared gradient norm, 0-dim; summed over the world, each element counts once."""
        shard = self.own(self.gradients)
        norms = [
            torch.linalg.vector_norm(shard[a:b], dtype=torch.float32).square() * w
            for a, b, w in self.segments
        ]
        return torch.stack(norms).sum() if norms else shard.new_zeros((), dtype=torch.float32)

    def weight_square_norm(self) -> Tensor:
        """The same of the weights."""
        norms = [torch.linalg.vector_norm(self.master[a:b]).square() * w for a, b, w in self.segments]
        return torch.stack(norms).sum() if norms else self.master.new_zeros(())

    def boxes(self) -> Iterator[ShardBox]:
        """The global boxes that this rank's shard holds, padding left out."""
        first_copy = self.axis.size > 1 or self.mesh.zero.rank == 0
        first_end = all(axis.rank == 0 for axis in self.partial if axis.name == "ends")
        for slot in self.slots:
            local = slot.parameter.shape
            for box in layout_of(slot.parameter).boxes(slot.name, self.mesh.tensor.rank):
                assert box.sizes[1:] == tuple(local[1:]), "only rows are padded, so a box is contiguous"
                begin = slot.start - self.first + box.local_offsets[0] * math.prod(local[1:])
                saved = first_copy and first_end and box.replica == 0
                low, high = max(0, -begin), min(math.prod(box.sizes), self.length - begin)
                for offset, offsets, sizes in split_range(box.sizes, low, high):
                    where = tuple(a + b for a, b in zip(box.offsets, offsets, strict=True))
                    yield ShardBox(box.name, box.shape, where, sizes, begin + offset, saved)


def split_range(
    shape: tuple[int, ...], low: int, high: int
) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Cut the elements [low, high) of a row-major tensor into contiguous boxes: (first element, offsets, sizes).

    A matrix gives at most three: the end of a row, whole rows, the beginning of a row.
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
            for at, offsets, sizes in split_range(shape[1:], column, stop - row * width):
                yield row * width + at, (row, *offsets), (1, *sizes)
            low = stop
