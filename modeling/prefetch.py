"""The next batch, made ready by a thread while the device works.

Gathering windows from a memory map runs at hundreds of millions of tokens a second in one thread; worker processes would
cost more than they save.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np


class Prefetch:
    """Batches of steps first to last, in order.

    Args:
        make: gives the batch of a step; runs in the thread.
        ahead: how many are held ready.
    """

    def __init__(self, make: Callable[[int], np.ndarray], first: int, last: int, ahead: int = 2) -> None:
        self._make, self._next, self._last = make, first, last
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._ready: list[Future[np.ndarray]] = []
        for _ in range(ahead):
            self._submit()

    def _submit(self) -> None:
        if self._next <= self._last:
            self._ready.append(self._pool.submit(self._make, self._next))
            self._next += 1

    def next(self) -> np.ndarray:
        """The batch of the next step; what reading it raised is raised here."""
        batch = self._ready.pop(0).result()
        self._submit()
        return batch
