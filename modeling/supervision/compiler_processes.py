"""Compilers of this rank: child processes that use the CPU.

Other children count as compilers too if they compute, such as those that a user's loss starts.
"""

from __future__ import annotations

import contextlib
import time

import psutil

SHARE = 0.1  # of a core; idle workers use less
OTHERS = frozenset({"neuron-monitor"})  # names of children that are no compilers (telemetry.py)


class CompilerProcesses:
    """The descendants of this process, besides OTHERS."""

    def __init__(self) -> None:
        self._polled, self._seconds = time.monotonic(), _cpu_seconds()

    def poll(self) -> bool:
        """Whether they have used more than SHARE of a core since the last call."""
        before = self._polled, self._seconds
        self._polled, self._seconds = time.monotonic(), _cpu_seconds()
        return self._seconds - before[1] > SHARE * (self._polled - before[0])


def _cpu_seconds() -> float:
    """CPU time of the descendants of this process, including those that have ended."""
    process = psutil.Process()
    seconds = 0.0
    with contextlib.suppress(psutil.Error, OSError):
        times = process.cpu_times()
        seconds += times.children_user + times.children_system
        for child in process.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.name() not in OTHERS:
                    seconds += sum(child.cpu_times()[:4])  # with those of its children that have ended
    return seconds
