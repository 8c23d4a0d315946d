"""The next batch, made ready by a thread while the device works.

Gathering windows from a memory map runs at hundreds of millions of tokens a second in one thread; worker processes would
cost more than they save. Where there is an accelerator the thread puts batches into pinned memory, from which they are copied
while it computes.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from modeling.data.corpus import Samples

if TYPE_CHECKING:
    from modeling.training.trainer import Trainer


class Batch(NamedTuple):
    """A rank's samples of a step; nothing where it reads none.

    Attributes:
        tokens: (b, s + 1) int64.
        documents: (b, s) int64, the place in its sample that each token's document begins at; None where masks are off.
    """

    tokens: Tensor | None = None
    documents: Tensor | None = None


def read(trainer: Trainer, samples: Samples, first: int, count: int) -> Batch:
    """The samples [first, first + count), ready to be copied to the trainer's device."""
    arrays = [samples.batch(first, count)]
    if trainer.profile.train.document_masks:
        arrays.append(samples.documents(first, count))
    tensors = [torch.from_numpy(array) for array in arrays]
    if trainer.torch_device.type == "cuda":
        tensors = [tensor.pin_memory() for tensor in tensors]
    return Batch(*tensors)


class Prefetch:
    """Batches of steps first to last, in order.

    Args:
        make: gives the batch of a step; runs in the thread.
        ahead: how many are held ready.
    """

    def __init__(self, make: Callable[[int], Batch], first: int, last: int, ahead: int = 2) -> None:
        self._make, self._next, self._last = make, first, last
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._ready: list[Future[Batch]] = []
        for _ in range(ahead):
            self._submit()

    def _submit(self) -> None:
        if self._next <= self._last:
            self._ready.append(self._pool.submit(self._make, self._next))
            self._next += 1

    def next(self) -> Batch:
        """The batch of the next step; what reading it raised is raised here."""
        batch = self._ready.pop(0).result()
        self._submit()
        return batch
