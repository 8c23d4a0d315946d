"""Reads many small files of a store: in threads where reading waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tasks.store.store import Store

T = TypeVar("T")
R = TypeVar("R")

READERS = 16  # threads that read a slow store
SAMPLE, SAMPLE_SECONDS = 16, 0.1  # at most so many items, and so long, show whether a folder is slow


def read_each(store: Store, items: Sequence[T], read: Callable[[T], R]) -> list[R]:
    """Read each item: in threads from an object store or a slow file system.

    On a fast disk, threads cost more time than they save.
    """
    begun, used, found = time.perf_counter(), time.thread_time(), list[R]()
    for item in items[: 0 if store.is_remote else SAMPLE]:
        found.append(read(item))
        if time.perf_counter() - begun > SAMPLE_SECONDS:
            break
    wall, cpu = time.perf_counter() - begun, time.thread_time() - used
    if not store.is_remote and wall < 5 * cpu:
        return [*found, *map(read, items[len(found) :])]
    with ThreadPoolExecutor(READERS) as pool:
        return [*found, *pool.map(read, items[len(found) :])]
