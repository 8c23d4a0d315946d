"""Batch prefetching: a background thread reads the next batches while the device computes.

One thread gathers windows from memory maps at hundreds of millions of tokens per second; worker processes would cost
more than they save. For a GPU the thread pins batches in host memory, so that they can be copied asynchronously.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from torch import Tensor

DEPTH = 2  # batches to read ahead


class Batch(NamedTuple):
    """A rank's samples of one step or evaluation pass; empty on a rank that reads none."""

    # (rows, s + 1) int64: ids; for fine-tuning also complements of ids, and padding (records.py)
    tokens: Tensor | None = None
    # (rows, s) int64, position where each token's document begins; None: attention crosses documents
    documents: Tensor | None = None
    # (rows, s) int64, number in its row of the sequence that a token and the next belong to, else -1; None: pairs are not packed
    answers: Tensor | None = None
    # (rows) or (rows, answers) float32, log-probability of each row's answers under the reference model, for dpo; None: computed
    # by the trainer if the objective needs it, else 0
    reference: Tensor | None = None


class Prefetcher:
    """Batches of the steps `first` to `last`, in order, read in a background thread.

    Args:
        read: function that returns the batch of a step; called in the thread.
    """

    def __init__(self, read: Callable[[int], Batch], first: int, last: int) -> None:
        self._read, self._next_step, self._last = read, first, last
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._queue: list[Future[Batch]] = []
        for _ in range(DEPTH):
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
        """The batch of the next step; raises the error with which reading it failed."""
        batch = self._queue.pop(0).result()
        self._submit()
        return batch

    def close(self) -> None:
        """End the thread, after the batch that it is reading."""
        self._pool.shutdown(wait=True, cancel_futures=True)
