"""Whole matrices out of the optimizer's shards, for devices that run compiled programs only.

In matrices.py each rank sends what it has, and orthogonalizes matrices of its own shapes. A compiled program depends neither on
its rank nor on data: shapes are static, all-to-alls even. So all matrices of a rank's stages are exchanged at once. Those of
equal shape are dealt to the ranks in turn, so that every rank has stacks of the same shapes; a few matrices may be unused.

Which elements go where is data: indices of blocks, the longest runs of elements that no shard, row or parameter cuts. Over g
ranks, what one sends to another is padded to the longest such message, of m blocks there and m' blocks back:

    shards      (n, block)       all buckets' shards of this rank
    collect     (g·m, block)     blocks for each owner; of replicated rows (KV heads) only those of the first replica
    stacks      (k, block)       the matrices of this rank
    scatter     (g·m', block)    blocks for each rank that holds them, replicas included

Padding and unused matrices have arbitrary values, which reach no weight.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product

import torch
from torch import Tensor

from parallel.layout import layout_of
from parallel.mesh import Mesh
from parallel.optimizer.buckets import Bucket, ShardBox
from parallel.optimizer.matrices import Packing, Shape, cut, matrix_axis, matrix_boxes, matrix_shapes
from parallel.optimizer.newton_schulz import Coefficients, orthogonalize

Stack = tuple[int, int, int]
"""Matrices of a rank, rows, columns."""


@dataclass(frozen=True)
class _Part:
    """A box of a matrix in a rank's shards."""

    box: ShardBox
    owner: int  # the rank that has the matrix
    matrix: int  # first block of the matrix in the owner's stacks
    first: int  # first block of the box in the shards

    def in_shards(self, block: int) -> Tensor:
        """Its blocks in the shards, in the order of its elements."""
        return torch.arange(self.first, self.first + math.prod(self.box.sizes) // block)

    def in_stacks(self, block: int) -> Tensor:
        """Its blocks in the owner's stacks, in the order of its elements."""
        (row, column), (rows, columns) = self.box.offsets, self.box.sizes
        down = torch.arange(row, row + rows) * (self.box.shape[1] // block)
        across = torch.arange(column // block, (column + columns) // block)
        return (self.matrix + down[:, None] + across).flatten()


class MatrixStacks:
    """The matrices of some buckets as stacks, and the indices of the blocks that are exchanged for them.

    Args:
        buckets: those with the same `matrix_axis`; all of their parameters are matrices.
        heads: whether those of heads are cut into the rows of each.

    Attributes:
        axis: the ranks that hold parts of the matrices.
        block: elements of a block.
        shapes: of the stacks, the same on every rank.
        sent, assembled: of the shards' blocks for each owner; of the stacks' blocks in what an owner receives.
        returned, placed: of the stacks' blocks for each rank; of each bucket's blocks in what a rank receives.
        longer_sides: for each bucket, the larger of rows and columns of its blocks' matrices, (n, 1) float32; 0 for padding.
    """

    def __init__(self, buckets: Sequence[Bucket], mesh: Mesh, heads: bool) -> None:
        self.buckets, self.axis = buckets, matrix_axis(buckets[0], mesh)
        self.block = block = _block(buckets)
        shapes = {name: shape for bucket in buckets for name, shape in matrix_shapes(bucket, heads).items()}
        self.shapes, owners = _deal(shapes, self.axis.size, block)
        lengths = [bucket.length // block for bucket in buckets]
        firsts = [0, *accumulate(lengths)]
        # The axis is (shard, tensor rank), the latter faster.
        parts = [
            [
                _Part(box, *owners[box.name], first + box.start // block)
                for bucket, first in zip(buckets, firsts, strict=False)
                for box in matrix_boxes(bucket, heads, *divmod(rank, mesh.tensor.size))
            ]
            for rank in range(self.axis.size)
        ]
        longer_sides = torch.zeros(firsts[-1], 1)
        for part in parts[self.axis.rank]:
            longer_sides[part.in_shards(block)] = max(part.box.shape)
        collected = [[part for part in each if part.box.replica == 0] for each in parts]
        sent, received, longest = self._messages(collected)
        stacked = sum(map(math.prod, self.shapes)) // block
        indices = [_padded(sent, longest), _positions(received, longest, stacked)]
        held, returned, longest = self._messages(parts)
        indices += [_padded(returned, longest), *_positions(held, longest, firsts[-1]).split(lengths)]
        device = buckets[0].master.device
        # Half the memory, on all ranks alike.
        dtype = torch.int32 if max(firsts[-1], *map(len, indices)) < 2**31 else torch.int64
        self.sent, self.assembled, self.returned, *self.placed = (each.to(device, dtype) for each in indices)
        self.longer_sides = [each.to(device) for each in longer_sides.split(lengths)]

    def _messages(self, parts: Sequence[Sequence[_Part]]) -> tuple[list[Tensor], list[Tensor], int]:
        """Blocks of this rank's shards by owner, of its stacks by holder, and the longest message of any.

        Args:
            parts: of each rank, in the order in which they are sent.
        """
        own, ranks, counts = self.axis.rank, range(self.axis.size), Counter[tuple[int, int]]()
        for rank in ranks:
            for part in parts[rank]:
                counts[rank, part.owner] += math.prod(part.box.sizes) // self.block
        of_shards = [
            [part.in_shards(self.block) for part in parts[own] if part.owner == rank] for rank in ranks
        ]
        of_stacks = [
            [part.in_stacks(self.block) for part in parts[rank] if part.owner == own] for rank in ranks
        ]
        return [*map(_joined, of_shards)], [*map(_joined, of_stacks)], max(counts.values())


def collect(shards: Sequence[Tensor], sent: Tensor, block: int) -> Tensor:
    """The blocks of flat shards that are sent to the owners, (g·m, block)."""
    return torch.cat([shard.view(-1, block) for shard in shards])[sent]


def orthogonalize_stacks(
    received: Tensor,
    assembled: Tensor,
    returned: Tensor,
    shapes: Sequence[Stack],
    coefficients: Coefficients,
) -> Tensor:
    """Orthogonalize each matrix of the stacks; received (g·m, block) -> sent back (g·m', block)."""
    block = received.shape[1]
    parts = received[assembled].split([math.prod(shape) // block for shape in shapes])  # of (k, block)
    found = [
        orthogonalize(part.view(shape), coefficients).reshape(-1, block)
        for part, shape in zip(parts, shapes, strict=True)
    ]
    return torch.cat(found)[returned]


@dataclass(frozen=True)
class StackSizes:
    """Elements of an update by stacks, the same on every rank.

    Attributes:
        block: see `MatrixStacks`.
        held: of the shards.
        sent, returned: of the messages to all owners, and back, with their padding.
        shapes: of the stacks, unused matrices included.
    """

    block: int
    held: int
    sent: int
    returned: int
    shapes: Sequence[Stack]

    @property
    def stacked(self) -> int:
        """Elements of the stacks."""
        return sum(map(math.prod, self.shapes))

    @property
    def peak(self) -> int:
        """The most elements at the same time, in the dtype that is exchanged.

        First the shards, also as one tensor, and their blocks, sent and received; then what was received, the stacks, their
        products, the results, also as one tensor, and what is sent back.
        """
        return max(2 * (self.held + self.sent), self.sent + 4 * self.stacked + self.returned)

    @property
    def index_bytes(self) -> int:
        """Bytes of indices and longer sides."""
        return 4 * (self.sent + self.stacked + self.returned + 2 * self.held) // self.block


def stack_sizes(buckets: Sequence[Packing], shards: int, tensor: int, heads: bool) -> StackSizes:
    """What `MatrixStacks` of buckets will have, from their packing alone.

    Args:
        shards, tensor: ranks; together those of the axis.
    """
    block, ranks = _block(buckets), shards * tensor
    shapes = {name: shape for bucket in buckets for name, shape in matrix_shapes(bucket, heads).items()}
    stacks, owners = _deal(shapes, ranks, block)
    # Elements by shard, tensor rank and owner; those of the first replicas are collected.
    collected, held = Counter[tuple[int, int, int]](), Counter[tuple[int, int, int]]()
    for bucket, rank in product(buckets, range(tensor)):
        length = bucket.length
        for name, replica, start, stop in _spans(bucket, rank, heads):
            for shard in range(start // length, math.ceil(stop / length)):
                elements = min(stop, (shard + 1) * length) - max(start, shard * length)
                held[shard, rank, owners[name][0]] += elements
                if replica == 0:
                    collected[shard, rank, owners[name][0]] += elements
    total = sum(bucket.length for bucket in buckets)
    return StackSizes(block, total, ranks * max(collected.values()), ranks * max(held.values()), stacks)


def _spans(bucket: Packing, rank: int, heads: bool) -> Iterator[tuple[str, int, int, int]]:
    """Name, replica, start and stop of the matrices' parts in a tensor rank's bucket, all shards together."""
    for slot in bucket.slots:
        layout, width = layout_of(slot.parameter), slot.parameter.shape[1]
        for box in layout.boxes(slot.name, rank):
            low, high = box.offsets[0], box.offsets[0] + box.sizes[0]
            zero = slot.start + (box.local_offsets[0] - low) * width  # where the section's row 0 would be
            for suffix, first, shape in cut(box.shape, layout.head_rows if heads else (), low, high):
                begin, end = max(first, low), min(first + shape[0], high)
                yield box.name + suffix, box.replica, zero + begin * width, zero + end * width


def _block(buckets: Sequence[Packing]) -> int:
    """Elements of a block."""
    return math.gcd(*(size for bucket in buckets for size in _multiples(bucket)))


def _multiples(bucket: Packing) -> Iterable[int]:
    """Sizes that the blocks of a bucket divide, the same on every rank."""
    yield bucket.length
    for slot in bucket.slots:
        yield slot.start
        yield slot.parameter.shape[1]


def _deal(
    shapes: Mapping[str, Shape], ranks: int, block: int
) -> tuple[list[Stack], dict[str, tuple[int, int]]]:
    """Give matrices of equal shape to the ranks in turn.

    Returns:
        shapes of the stacks; of each matrix its owner, and its first block there.
    """
    by_shape: dict[Shape, list[str]] = {}
    for name, shape in shapes.items():
        by_shape.setdefault(shape, []).append(name)
    stacks: list[Stack] = []
    owners: dict[str, tuple[int, int]] = {}
    first = 0
    for (rows, columns), names in by_shape.items():
        stacks.append((math.ceil(len(names) / ranks), rows, columns))
        for number, name in enumerate(names):
            # Continues where the shape before ended, so that unused matrices are spread over the ranks.
            owners[name] = len(owners) % ranks, first + number // ranks * (rows * columns // block)
        first += math.prod(stacks[-1]) // block
    return stacks, owners


def _joined(indices: Sequence[Tensor]) -> Tensor:
    return torch.cat([torch.empty(0, dtype=torch.int64), *indices])


def _padded(messages: Sequence[Tensor], length: int) -> Tensor:
    """Indices of all messages, each padded to `length`."""
    result = torch.zeros(len(messages), length, dtype=torch.int64)
    for row, message in zip(result, messages, strict=True):
        row[: len(message)] = message
    return result.flatten()


def _positions(messages: Sequence[Tensor], length: int, size: int) -> Tensor:
    """For each of `size` blocks, its position in messages of `length`, which contain these blocks; else 0."""
    result = torch.zeros(size, dtype=torch.int64)
    for number, message in enumerate(messages):
        result[message] = torch.arange(number * length, number * length + len(message))
    return result
