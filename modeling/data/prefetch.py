"""Batch prefetching: a background thread reads the next batches while the device computes.

One thread gathers windows from memory maps at hundreds of millions of tokens a second; worker processes would cost
more than they save. For a GPU the thread pins batches in host memory, so that they are copied asynchronously.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from modeling.data.corpus import Samples
from modeling.data.records import RecordSamples
from parallel.device import page_locked

if TYPE_CHECKING:
    from modeling.training.trainer import Trainer


class Batch(NamedTuple):
    """A rank's samples of one step; empty on a rank that reads none."""

    tokens: Tensor | None = None  # (b, s + 1) int64
    # (b, s) int64, the position in its sample where each token's document starts; None without document masks
    documents: Tensor | None = None
    # (b, s) int64, the number in its row of the sequence of a token and the next, else -1; None unless pairs are packed
    answers: Tensor | None = None
    # (b, answers) float32, log-probability of each row's answers under a reference model; None without one
    reference: Tensor | None = None


def read_batch(trainer: Trainer, samples: Samples | RecordSamples, first: int, count: int) -> Batch:
    """The samples [first, first + count), ready to be copied to the device."""
    arrays = {"tokens": samples.batch(first, count)}
    if trainer.profile.document_masks:
        arrays["documents"] = samples.document_starts(first, count)
    if isinstance(samples, RecordSamples) and samples.answers > 1:
        arrays["answers"] = samples.answer_numbers(first, count)
    if isinstance(samples, RecordSamples) and samples.reference is not None:
        arrays["reference"] = samples.references(first, count)
    device = trainer.torch_device
    return Batch(**{name: page_locked(torch.from_numpy(array), device) for name, array in arrays.items()})


class Prefetcher:
    """Batches of the steps `first` to `last`, in order, read in a background thread.

    Args:
        read: returns the batch of a step; called in the thread.
        depth: number of batches to read ahead.
    """

    def __init__(self, read: Callable[[int], Batch], first: int, last: int, depth: int = 2) -> None:
        self._read, self._next_step, self._last = read, first, last
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._queue: list[Future[Batch]] = []
        for _ in range(depth):
            self._submit()

    def _submit(self) -> None:
        if self._next_step <= self._last:
            self._queue.append(self._pool.submit(self._read, self._next_step))
            self._next_step += 1

    @property
    def ready(self) -> bool:
        """Whether the next batch has been read."""
        return self._queue[0].done()

    def next(self) -> Batch:
        """The batch of the next step; raises what reading it raised."""
        batch = self._queue.pop(0).result()
        self._submit()
        return batch
