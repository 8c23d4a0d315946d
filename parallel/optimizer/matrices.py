"""Whole matrices out of the optimizer's shards: assembled on one rank each, and scattered back.

A matrix is a section of a layout, a global tensor: Q, K and V of a fused projection are three, and each expert has its own gate,
up and down projections. A rule may cut it into the rows of its heads, which are then a matrix each. The ranks of `Mesh.matrix`
(for experts `expert_matrix`) hold its parts: rows or columns of each tensor rank, cut again by the shards of buckets. One of them
owns it. Owners are chosen by cost alone, so that every rank computes the same ones without communication, and each matrix is
complete, in the same memory layout, at every topology.

    collect    each part is sent to the owner in one packed all-to-all per bucket; of replicated rows (KV heads) only the first
               replica's
    scatter    the owner's result is sent back to all ranks that hold a part, replicas included

Elements sent by a rank for n in its shard, over g ranks: n(g-1)/g each way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from parallel import collectives
from parallel.layout import global_name, layout_of
from parallel.mesh import Axis, Mesh
from parallel.optimizer.buckets import Bucket, ShardBox, Slot

Shape = tuple[int, ...]


class Packing(Protocol):
    """Where a bucket, which may only be planned, has its parameters."""

    @property
    def slots(self) -> list[Slot]: ...

    @property
    def length(self) -> int:
        """Elements of a shard."""


class Owners:
    """Chooses the owner of each matrix: of a bucket's, the costliest first, the least loaded rank.

    Loads of earlier buckets count, so that ranks without a matrix in one bucket get those of the next.

    Args:
        ranks: number of ranks of the axis.
        cost: of a matrix of a shape.
    """

    def __init__(self, ranks: int, cost: Callable[[Shape], int]) -> None:
        self.loads, self._cost = [0] * ranks, cost

    def choose(self, shapes: Mapping[str, Shape]) -> dict[str, int]:
        """The owner's rank along the axis of each matrix, by name."""
        owners = {}
        for name in sorted(shapes, key=lambda name: (-self._cost(shapes[name]), name)):
            owners[name] = min(range(len(self.loads)), key=lambda rank: (self.loads[rank], rank))
            self.loads[owners[name]] += self._cost(shapes[name])
        return owners


@dataclass(frozen=True)
class Packed:
    """Parts that are on their way, one after the other."""

    pending: Tensor
    boxes: Sequence[ShardBox]  # in the order of their elements
    ready: bool  # whether nothing is awaited

    def parts(self) -> list[tuple[ShardBox, Tensor]]:
        """Wait for the parts; each has the shape of its box."""
        flat = self.pending if self.ready else collectives.wait(self.pending)
        sizes = [math.prod(box.sizes) for box in self.boxes]
        return [(box, part.view(box.sizes)) for box, part in zip(self.boxes, flat.split(sizes), strict=True)]


class BucketMatrices:
    """The matrices of a bucket, and which parts of them this rank exchanges with each other rank.

    Args:
        bucket: all of its parameters are matrices.
        owners: chooses the owners; it has seen the same buckets before on every rank.
        heads: whether those of heads are cut into the rows of each.

    Attributes:
        owned: shapes of the matrices that this rank owns, by name.
    """

    def __init__(self, bucket: Bucket, mesh: Mesh, owners: Owners, heads: bool) -> None:
        self.axis, self.length = matrix_axis(bucket, mesh), bucket.length
        shapes = matrix_shapes(bucket, heads)
        chosen = owners.choose(shapes)
        ranks = range(self.axis.size)
        own = self.axis.rank
        self.owned = {name: shape for name, shape in shapes.items() if chosen[name] == own}
        held = [*matrix_boxes(bucket, heads)]
        # Parts of each rank's shard whose matrices this rank owns; the axis is (shard, tensor rank), the latter faster.
        tensor = mesh.tensor.size
        mine = [
            [box for box in matrix_boxes(bucket, heads, *divmod(rank, tensor)) if chosen[box.name] == own]
            for rank in ranks
        ]
        to_owners = [[box for box in held if chosen[box.name] == rank] for rank in ranks]
        self._collects = _Exchange(self.axis, [*map(_first, to_owners)], [*map(_first, mine)])
        self._scatters = _Exchange(self.axis, mine, to_owners)

    def collect(self, shard: Tensor) -> Packed:
        """Start to send this rank's parts, in a flat shard, to the owners."""
        return self._collects.start([box.view(shard) for box in self._collects.sent], shard)

    def assemble(self, packed: Packed) -> dict[str, Tensor]:
        """The matrices that this rank owns."""
        matrices = {name: packed.pending.new_empty(shape) for name, shape in self.owned.items()}
        for box, part in packed.parts():
            matrices[box.name][box.index()].copy_(part)
        return matrices

    def scatter(self, matrices: Mapping[str, Tensor], like: Tensor) -> Packed:
        """Start to send the parts of this rank's matrices to the ranks that hold them; in the dtype of `like`."""
        return self._scatters.start([matrices[box.name][box.index()] for box in self._scatters.sent], like)


class _Exchange:
    """A packed all-to-all of boxes.

    Args:
        sent: to each rank.
        received: from each rank.
    """

    def __init__(
        self, axis: Axis, sent: Sequence[Sequence[ShardBox]], received: Sequence[Sequence[ShardBox]]
    ) -> None:
        self._axis = axis
        self.sent = [box for boxes in sent for box in boxes]
        self._received = [box for boxes in received for box in boxes]
        self._send, self._receive = [*map(_numel, sent)], [*map(_numel, received)]

    def start(self, parts: Sequence[Tensor], like: Tensor) -> Packed:
        """Send `parts`, those of `sent`; every rank takes part, even if it has none."""
        flat = torch.cat([part.reshape(-1) for part in parts]) if parts else like.new_empty(0)
        ready = self._axis.size == 1
        if not ready:
            flat = collectives.start_uneven_all_to_all(flat, self._send, self._receive, self._axis)
        return Packed(flat, self._received, ready)


def matrix_axis(bucket: Bucket, mesh: Mesh) -> Axis:
    """The ranks that hold parts of a bucket's matrices."""
    return mesh.expert_matrix if bucket.axis is mesh.expert_shard is not mesh.dp_shard else mesh.matrix


def cut(
    shape: Shape, rows: Sequence[int], low: int = 0, high: int | None = None
) -> Iterator[tuple[str, int, Shape]]:
    """The matrices of a section with rows of [low, high): suffix of the name, first row, shape.

    Args:
        rows: of the matrices, in turn (`Layout.head_rows`); empty: the section is one matrix.
        high: None: the end of the section.
    """
    if not rows:
        yield "", 0, shape
        return
    period, high = sum(rows), shape[0] if high is None else high
    for turn in range(low // period, math.ceil(high / period)):
        starts = accumulate(rows, initial=turn * period)
        for number, (first, count) in enumerate(zip(starts, rows, strict=False), turn * len(rows)):
            if first < high and low < first + count:
                yield f"@{number}", first, (count, *shape[1:])


def matrix_shapes(bucket: Packing, heads: bool) -> dict[str, Shape]:
    """Global shape of each matrix of a bucket, by name."""
    return {
        name + suffix: shape
        for name, (section, rows) in _sections(bucket, heads).items()
        for suffix, _, shape in cut(section, rows)
    }


def matrix_boxes(
    bucket: Bucket, heads: bool, shard: int | None = None, tensor: int | None = None
) -> Iterator[ShardBox]:
    """The boxes of matrices in a rank's shard; other arguments are those of `Bucket.boxes`."""
    sections = _sections(bucket, heads)
    for box in bucket.boxes(shard, tensor):
        (begin, *others), (count, *sizes) = box.offsets, box.sizes
        for suffix, first, shape in cut(*sections[box.name], begin, begin + count):
            low, high = max(first, begin), min(first + shape[0], begin + count)
            yield replace(
                box,
                name=box.name + suffix,
                shape=shape,
                offsets=(low - first, *others),
                sizes=(high - low, *sizes),
                start=box.start + (low - begin) * math.prod(sizes),
            )


def _sections(bucket: Packing, heads: bool) -> dict[str, tuple[Shape, tuple[int, ...]]]:
    """Global shape of each section of a bucket, and the rows that it is cut into, by name."""
    layouts = [(slot.name, layout_of(slot.parameter)) for slot in bucket.slots]
    return {
        global_name(name, section.name): (section.shape, layout.head_rows if heads else ())
        for name, layout in layouts
        for section in layout.sections
    }


def _first(boxes: Sequence[ShardBox]) -> list[ShardBox]:
    """Without those of which an earlier tensor rank has a copy."""
    return [box for box in boxes if box.replica == 0]


def _numel(boxes: Sequence[ShardBox]) -> int:
    return sum(math.prod(box.sizes) for box in boxes)
