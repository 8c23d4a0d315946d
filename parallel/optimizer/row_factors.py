"""Multiply rows of weights after their update, wherever shards cut them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from parallel.optimizer.buckets import Bucket, ShardBox

ChooseFactors = Callable[[str], Tensor | None]
"""Which of a step's factors each row of a global tensor is multiplied by, (rows) int64 on the host; None: none of them."""


class RowFactors:
    """The rows of these buckets that have factors.

    Copies of a row are multiplied by the same factor on every rank, if all ranks have the same factors.
    """

    def __init__(self, buckets: Iterable[Bucket], choose: ChooseFactors) -> None:
        self._parts: dict[int, list[tuple[ShardBox, Tensor]]] = {}
        for bucket in buckets:
            for box in bucket.boxes():
                if (indices := choose(box.name)) is not None:
                    own = indices[box.offsets[0] :][: box.sizes[0]].to(bucket.master.device)
                    self._parts.setdefault(id(bucket), []).append((box, own))

    def apply(self, bucket: Bucket, factors: Tensor) -> None:
        """Multiply the master weights of an updated bucket; a factor of 1 changes no bit."""
        for box, indices in self._parts.get(id(bucket), ()):
            rows = box.view(bucket.master)
            rows.mul_(factors[indices].view(-1, *[1] * (rows.dim() - 1)))
            bucket.assigned = False  # the parameters, which the update may have set
