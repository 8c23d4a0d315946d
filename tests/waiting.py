"""Waiting for what other processes do."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil

T = TypeVar("T")


def until(condition: Callable[[], T], seconds: float = 180, every: float = 0.05) -> T:
    """The first true result of a condition, which is asked for a fifth of the time at most.

    Raises:
        TimeoutError: with the last result.
    """
    asked = time.monotonic()
    deadline = asked + seconds
    while not (result := condition()):
        now = time.monotonic()
        if now > deadline:
            raise TimeoutError(f"still {result!r} after {seconds:g} s")
        time.sleep(max(every, 4 * (now - asked)))
        asked = time.monotonic()
    return result


def gone(pid: int) -> bool:
    """Whether a process has ended; in some containers, nothing reaps it."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def until_written(*paths: Path) -> None:
    """Wait for files that are not empty."""
    until(lambda: all(path.exists() and path.stat().st_size for path in paths))
