"""Whole matrices out of the optimizer's shards, for devices that run compiled programs only.

In matrices.py each rank sends what it has, and orthogonalizes matrices of its own shapes. A compiled program depends neither on
its rank nor on data: shapes are static, all-to-alls even. So all matrices of a rank's stages are exchanged at once, and every
rank has stacks of the same shapes, with a slot for each of its matrices:

    slots       rows are not more than columns; a matrix with more rows is transposed. Matrices of equal shape, the largest
                first, are dealt to slots that larger ones left free, filled up with zeros, and then to a new stack
    owners      matrices at the same place in each bucket are dealt to the shards in turn: a rank has parts of few matrices of a
                bucket, but of one in each, and sends these to as many shards as possible

Which elements go where is data: indices of blocks, the longest runs of elements that no shard, row or parameter cuts. Over d
shards and t tensor ranks, a part goes to the owner's shard, and there over tensor ranks, which are near each other, to the owner;
results go the same way back. What a rank sends to another is padded to the longest such message of that exchange:

    shards       (n, block)       all buckets' shards of this rank
    collect      (d·a, block)     blocks for each shard; of replicated rows (KV heads) only those of the first replica
    relay        (t·b, block)     those that arrived, for each tensor rank
    stacks       (k, block)       the matrices of this rank
    return       (t·b', block)    blocks for each tensor rank that holds them, replicas included
    relay        (d·a', block)    those that arrived, for each shard

Padding of messages and of shards has arbitrary values, which reach no weight.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, product

import torch
from torch import Tensor

from parallel.layout import layout_of
from parallel.mesh import Mesh
from parallel.optimizer.buckets import Bucket, ShardBox
from parallel.optimizer.matrices import Packing, Shape, cut, matrix_boxes, matrix_shapes
from parallel.optimizer.newton_schulz import Coefficients, orthogonalize

Stack = tuple[int, int, int]
"""Matrices of a rank, rows, columns; rows are not more than columns."""
Owner = tuple[int, int]
"""Shard and tensor rank of the rank that has a matrix."""


@dataclass(frozen=True)
class _Slot:
    """Where a matrix is orthogonalized."""

    owner: Owner
    stack: int
    number: int  # among the stack's matrices of this owner
    first: int  # its first element in the owner's stacks
    width: int  # elements from a row to the next
    transposed: bool  # whether its columns are the stack's rows


@dataclass(frozen=True)
class _Part:
    """A box of a matrix in a rank's shards."""

    box: ShardBox
    slot: _Slot
    first: int  # first block of the box in the shards
    block: int

    @property
    def length(self) -> int:
        """Number of blocks."""
        return math.prod(self.box.sizes) // self.block

    def in_shards(self) -> Tensor:
        """Its blocks in the shards, in the order of its elements."""
        return torch.arange(self.first, self.first + self.length)

    def in_stacks(self) -> Tensor:
        """Its blocks in the owner's stacks, in the order of its elements."""
        (row, column), (rows, columns), block = self.box.offsets, self.box.sizes, self.block
        down = torch.arange(row, row + rows) * (self.slot.width // block)
        across = torch.arange(column // block, (column + columns) // block)
        return (self.slot.first // block + down[:, None] + across).flatten()


class MatrixStacks:
    """The matrices of some buckets as stacks, and the indices of the blocks that are exchanged for them.

    Args:
        buckets: those of one axis of shards; all of their parameters are matrices.
        heads: whether those of heads are cut into the rows of each.

    Attributes:
        axis: the shards; `tensor`: the tensor ranks.
        block: elements of a block.
        shapes: of the stacks, the same on every rank.
        transposed: for each stack, whether each of its matrices is stored with its columns as rows, (matrices) bool.
        sent, relayed, assembled: of the shards' blocks for each shard; of those that arrived for each tensor rank; of the stacks'
            blocks in what an owner receives, -1 for zeros.
        returned, relayed_back, placed: of the stacks' blocks for each tensor rank; of those that arrived for each shard; of each
            bucket's blocks in what a rank receives.
        longer_sides: for each bucket, the larger of rows and columns of its blocks' matrices, (n, 1) float32; 0 for padding.
    """

    def __init__(self, buckets: Sequence[Bucket], mesh: Mesh, heads: bool) -> None:
        self.buckets, self.axis, self.tensor = buckets, buckets[0].axis, mesh.tensor
        shards, ranks = range(self.axis.size), range(self.tensor.size)
        self.shapes, slots = _deal(buckets, len(shards), len(ranks), heads)
        self.block = block = _block(buckets, self.shapes, slots.values())
        lengths = [bucket.length // block for bucket in buckets]
        firsts = [0, *accumulate(lengths)]
        parts = [
            [
                [
                    _Part(box, slots[box.name], first + box.start // block, block)
                    for bucket, first in zip(buckets, firsts, strict=False)
                    for box in matrix_boxes(bucket, heads, shard, rank)
                ]
                for rank in ranks
            ]
            for shard in shards
        ]
        own = self.axis.rank, self.tensor.rank
        longer_sides = torch.zeros(firsts[-1], 1)
        for part in parts[own[0]][own[1]]:
            longer_sides[part.in_shards()] = max(part.box.shape)
        turned = [torch.zeros(count, dtype=torch.bool) for count, *_ in self.shapes]
        for slot in slots.values():
            if slot.owner == own:
                turned[slot.stack][slot.number] = slot.transposed
        collected = [[[part for part in held if part.box.replica == 0] for held in each] for each in parts]
        stacked = sum(map(math.prod, self.shapes)) // block
        *indices, placed = *_Route(collected, own).collect(stacked), *_Route(parts, own).scatter(firsts[-1])
        device = buckets[0].master.device
        # Half the memory, on all ranks alike.
        dtype = torch.int32 if max(firsts[-1], *map(len, indices)) < 2**31 else torch.int64
        messages = (each.to(device, dtype) for each in indices)
        self.sent, self.relayed, self.assembled, self.returned, self.relayed_back = messages
        self.placed = [each.to(device, dtype) for each in placed.split(lengths)]
        self.transposed = [each.to(device) for each in turned]
        self.longer_sides = [each.to(device) for each in longer_sides.split(lengths)]


class _Route:
    """The way of a rank's blocks between shards and stacks, of which every rank has a piece.

    Args:
        parts: of each shard and tensor rank, in the order in which they are sent.
        own: this rank's shard and tensor rank.
    """

    def __init__(self, parts: Sequence[Sequence[Sequence[_Part]]], own: Owner) -> None:
        shard, rank = own
        shards, ranks = len(parts), len(parts[0])
        to_shards, to_ranks = Counter[tuple[int, int, int]](), Counter[tuple[int, int, int]]()
        for i, each in enumerate(parts):
            for t, held in enumerate(each):
                for part in held:
                    to_shards[i, t, part.slot.owner[0]] += part.length
                    to_ranks[*part.slot.owner, t] += part.length
        self._longest = max(to_shards.values()), max(to_ranks.values())
        # Blocks of this rank's shards by shard of the owner, and of its stacks by tensor rank of the holder.
        self._in_shards = [
            _joined(part.in_shards() for part in parts[shard][rank] if part.slot.owner[0] == i)
            for i in range(shards)
        ]
        self._in_stacks = [
            _joined(part.in_stacks() for each in parts for part in each[t] if part.slot.owner == own)
            for t in range(ranks)
        ]
        # What this rank passes on: positions among messages of shards, and of tensor ranks.
        of_shards: list[Tensor] = []
        of_ranks: list[Tensor] = []
        ends = [t * self._longest[1] for t in range(ranks)]
        for i, each in enumerate(parts):
            begin = i * self._longest[0]
            for part in each[rank]:
                if part.slot.owner[0] == shard:
                    end = ends[part.slot.owner[1]]
                    of_shards.append(torch.arange(begin, begin + part.length))
                    of_ranks.append(torch.arange(end, end + part.length))
                    begin += part.length
                    ends[part.slot.owner[1]] += part.length
        self._passed = _joined(of_shards), _joined(of_ranks)

    def collect(self, stacked: int) -> tuple[Tensor, Tensor, Tensor]:
        """Indices of what is sent, passed on and put into stacks of so many blocks."""
        relayed = torch.zeros(len(self._in_stacks) * self._longest[1], dtype=torch.int64)
        relayed[self._passed[1]] = self._passed[0]
        assembled = _positions(self._in_stacks, self._longest[1], torch.full((stacked,), -1))
        return _padded(self._in_shards, self._longest[0]), relayed, assembled

    def scatter(self, held: int) -> tuple[Tensor, Tensor, Tensor]:
        """Indices of what is returned, passed on and put into shards of so many blocks."""
        relayed = torch.zeros(len(self._in_shards) * self._longest[0], dtype=torch.int64)
        relayed[self._passed[0]] = self._passed[1]
        placed = _positions(self._in_shards, self._longest[0], torch.zeros(held, dtype=torch.int64))
        return _padded(self._in_stacks, self._longest[1]), relayed, placed


def collect(shards: Sequence[Tensor], sent: Tensor, block: int) -> Tensor:
    """The blocks of flat shards that are sent to the owners, (g·m, block)."""
    return torch.cat([shard.view(-1, block) for shard in shards])[sent]


def relay(received: Tensor, relayed: Tensor) -> Tensor:
    """The blocks that are passed on, of those that arrived."""
    return received[relayed]


def orthogonalize_stacks(
    received: Tensor,
    assembled: Tensor,
    returned: Tensor,
    transposed: Sequence[Tensor],
    shapes: Sequence[Stack],
    coefficients: Coefficients,
) -> Tensor:
    """Orthogonalize each matrix of the stacks; received (t·b, block) -> sent back (t·b', block)."""
    block, found = received.shape[1], []
    blocks = torch.where(assembled[:, None] < 0, 0, received[assembled.clamp(min=0)])
    parts = blocks.split([math.prod(shape) // block for shape in shapes])  # of (k, block)
    for part, turned, (count, rows, columns) in zip(parts, transposed, shapes, strict=True):
        turned = turned[:, None, None]
        x = torch.where(turned, part.view(count, columns, rows).mT, part.view(count, rows, columns))
        x = orthogonalize(x, coefficients)
        flat = torch.where(turned[..., 0], x.mT.reshape(count, -1), x.reshape(count, -1))
        found.append(flat.view(-1, block))
    return torch.cat(found)[returned]


@dataclass(frozen=True)
class StackSizes:
    """Elements of an update by stacks, the same on every rank.

    Attributes:
        block: see `MatrixStacks`.
        held: of the shards.
        sent, relayed: of the messages to all shards, then to all tensor ranks, with their padding.
        returned, relayed_back: of those to all tensor ranks, then to all shards.
        shapes: of the stacks, unused matrices included.
    """

    block: int
    held: int
    sent: int
    relayed: int
    returned: int
    relayed_back: int
    shapes: Sequence[Stack]

    @property
    def stacked(self) -> int:
        """Elements of the stacks."""
        return sum(map(math.prod, self.shapes))

    @property
    def peak(self) -> int:
        """The most elements at the same time, in the dtype that is exchanged.

        First the shards, also as one tensor, and their blocks, sent and received; then what was received, the stacks, also in
        the order of rows, their products, the results, also as one tensor, and what is sent back.
        """
        relays = self.sent + 2 * self.relayed, self.returned + 2 * self.relayed_back
        return max(2 * (self.held + self.sent), *relays, self.relayed + 5 * self.stacked + self.returned)

    @property
    def index_bytes(self) -> int:
        """Bytes of indices and longer sides."""
        messages = self.sent + self.relayed + self.returned + self.relayed_back
        return 4 * (messages + self.stacked + 2 * self.held) // self.block


def stack_sizes(buckets: Sequence[Packing], shards: int, tensor: int, heads: bool) -> StackSizes:
    """What `MatrixStacks` of buckets will have, from their packing alone.

    Args:
        shards, tensor: ranks of the two axes.
    """
    stacks, slots = _deal(buckets, shards, tensor, heads)
    # Elements by shard, tensor rank and owner's shard, and by owner and tensor rank; those of first replicas are collected.
    counts = [Counter[tuple[int, int, int]]() for _ in range(4)]
    for bucket, rank in product(buckets, range(tensor)):
        length = bucket.length
        for name, replica, start, stop in _spans(bucket, rank, heads):
            owner = slots[name].owner
            for shard in range(start // length, math.ceil(stop / length)):
                elements = min(stop, (shard + 1) * length) - max(start, shard * length)
                for to_shards, to_ranks in (counts[:2], counts[2:]) if replica == 0 else (counts[2:],):
                    to_shards[shard, rank, owner[0]] += elements
                    to_ranks[*owner, rank] += elements
    sent, relayed, relayed_back, returned = (max(each.values()) for each in counts)
    held = sum(bucket.length for bucket in buckets)
    back = returned * tensor, relayed_back * shards
    block = _block(buckets, stacks, slots.values())
    return StackSizes(block, held, sent * shards, relayed * tensor, *back, stacks)


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


def _block(buckets: Sequence[Packing], stacks: Sequence[Stack], slots: Iterable[_Slot]) -> int:
    """Elements of a block."""
    sizes = [size for bucket in buckets for size in _multiples(bucket)]
    # Not the number of a stack's rows: it is the width of transposed matrices only.
    return math.gcd(
        *sizes, *map(math.prod, stacks), *(size for slot in slots for size in (slot.first, slot.width))
    )


def _multiples(bucket: Packing) -> Iterable[int]:
    """Sizes that the blocks of a bucket divide, the same on every rank."""
    yield bucket.length
    for slot in bucket.slots:
        yield slot.start
        yield slot.parameter.shape[1]


def _deal(
    buckets: Sequence[Packing], shards: int, tensor: int, heads: bool
) -> tuple[list[Stack], dict[str, _Slot]]:
    """The stacks' shapes, and the slot of each matrix."""
    by_shape: dict[tuple[int, int], list[tuple[int, str, Shape]]] = {}
    for bucket in buckets:
        for place, (name, shape) in enumerate(matrix_shapes(bucket, heads).items()):
            by_shape.setdefault((min(shape), max(shape)), []).append((place, name, shape))
    ranks, stacks, slots = shards * tensor, list[Stack](), dict[str, _Slot]()
    # of each stack: its first element, and the number of its slots with a matrix
    firsts, taken = list[int](), list[int]()
    begin = 0
    for rows, columns in sorted(by_shape, key=lambda sides: (-math.prod(sides), sides)):
        # Those at the same place in each bucket follow each other.
        waiting = sorted(by_shape[rows, columns], key=lambda each: each[0])
        fitting = [
            stack for stack, (_, *sides) in enumerate(stacks) if rows <= sides[0] and columns <= sides[1]
        ]
        free = sum(stacks[stack][0] * ranks - taken[stack] for stack in fitting)
        if len(waiting) > free:
            fitting.append(len(stacks))
            stacks.append((math.ceil((len(waiting) - free) / ranks), rows, columns))
            firsts.append(begin)
            begin += math.prod(stacks[-1])
            taken.append(0)
        for stack in fitting:
            count, *sides = stacks[stack]
            room = count * ranks - taken[stack]
            for _, name, shape in waiting[:room]:
                number, owner = divmod(taken[stack], ranks)
                turned = shape[0] > shape[1]
                first, width = firsts[stack] + number * math.prod(sides), sides[0 if turned else 1]
                where = owner % shards, owner // shards
                slots[name] = _Slot(where, stack, number, first, width, turned)
                taken[stack] += 1
            waiting = waiting[room:]
    return stacks, slots


def _joined(indices: Iterable[Tensor]) -> Tensor:
    return torch.cat([torch.empty(0, dtype=torch.int64), *indices])


def _padded(messages: Sequence[Tensor], length: int) -> Tensor:
    """Indices of all messages, each padded to `length`."""
    result = torch.zeros(len(messages), length, dtype=torch.int64)
    for row, message in zip(result, messages, strict=True):
        row[: len(message)] = message
    return result.flatten()


def _positions(messages: Sequence[Tensor], length: int, result: Tensor) -> Tensor:
    """Overwrite what messages of `length` contain of some blocks by the block's position in them."""
    for number, message in enumerate(messages):
        result[message] = torch.arange(number * length, number * length + len(message))
    return result
