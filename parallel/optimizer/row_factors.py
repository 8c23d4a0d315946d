"""Multiply rows of weights after their update, wherever shards cut them.

Which factor multiplies each of a shard's blocks (`Bucket.block`) is data, so that programs are the same on every rank. All blocks
of a bucket that has such rows are read and written; most factors are 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from parallel.layout import layout_of
from parallel.optimizer.arithmetic import Arithmetic
from parallel.optimizer.buckets import Bucket

ChooseFactors = Callable[[str], Tensor | None]
"""Which of a step's factors each row of a global tensor is multiplied by, (rows) on the host; None: the first, which is 1."""


class RowFactors:
    """The buckets with rows that have factors.

    Copies of a row are multiplied by the same factor on every rank, if all ranks have the same factors.
    """

    def __init__(self, buckets: Iterable[Bucket], choose: ChooseFactors, arithmetic: Arithmetic) -> None:
        self._scale = arithmetic.prepare(scale_blocks)
        chosen = {id(bucket): _chosen(bucket, choose) for bucket in buckets}
        self._indices = {key: indices for key, indices in chosen.items() if indices is not None}

    def apply(self, bucket: Bucket, factors: Tensor, skip: Tensor) -> None:
        """Multiply the master weights of an updated bucket, unless `skip` is 1; a factor of 1 changes no bit."""
        if (indices := self._indices.get(id(bucket))) is not None:
            self._scale(bucket.master, factors, indices, skip)
            bucket.assigned = False  # the parameters, which the update may have set


def _chosen(bucket: Bucket, choose: ChooseFactors) -> Tensor | None:
    """The factor of each block, (blocks) int32; None if no rank's shard has rows with factors."""
    # Decided by the parameters, not by this rank's shard of them: graphs do not depend on the rank.
    names = {
        box.name
        for slot in bucket.slots
        for box in layout_of(slot.parameter).boxes(slot.name, bucket.mesh.tensor.rank)
    }
    rows = {name: found for name in names if (found := choose(name)) is not None}
    if not rows:
        return None
    block = bucket.block
    indices = torch.zeros(bucket.length // block, dtype=torch.int32)
    for box in bucket.boxes():
        if box.name in rows:
            own = rows[box.name][box.offsets[0] :][: box.sizes[0]]
            blocks = math.prod(box.sizes[1:]) // block  # of each row
            indices[box.start // block :][: len(own) * blocks] = own.int().repeat_interleave(blocks)
    return indices.to(bucket.master.device)


def scale_blocks(weights: Tensor, factors: Tensor, indices: Tensor, skip: Tensor) -> None:
    """Multiply each block of flat weights by the factor with its index, unless `skip` is 1."""
    each = factors.where(skip == 0, 1.0)[indices]
    weights.view(len(indices), -1).mul_(each[:, None])
