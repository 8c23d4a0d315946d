"""Timeouts: how long a rank may take in each phase of a job before it counts as hung.

    step         hang_factor · median step time + hang_seconds, at most the longest of all
    compile      from the start until a median of steps is known
    load, save, evaluate, data, report    PHASES

While the compiler of a rank is running, none of them ends before COMPILER_SECONDS (watchdog.py).

The process group's timeout, `MARGIN` longer than the longest of these, ends a process without dumping stacks. It is longer if a
rank may wait for the compiler of another one for hours.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

MIN_STEPS = 3  # needed for a median step time
STEP = "step"
COMPILE = "compile"
REPORT = "report"
PHASES = {  # seconds
    COMPILE: 1800.0,
    "load": 3600.0,
    "save": 3600.0,
    "evaluate": 3600.0,  # without a finished pass
    "data": 1800.0,  # a batch that was not prefetched in time
    REPORT: 1800.0,  # metrics, events and log lines: the shared file system may stall
}
MARGIN = 600.0  # seconds by which the process group's timeout exceeds the longest
COMPILER_SECONDS = 6 * 3600.0  # in which a slow compiler compiles all graphs of a rank


@dataclass(frozen=True)
class Timeouts:
    """Timeouts of a run, in seconds.

    Args:
        factor: `cluster.hang_factor`, in median step times.
        grace: `cluster.hang_seconds`; None: no watchdog, only the process group's timeout.
        slow_compiler: whether compiling the graphs of a rank may take hours.
    """

    factor: float
    grace: float | None
    slow_compiler: bool = False

    def of(self, phase: str, step_seconds: Sequence[float] = ()) -> float:
        """The timeout of a phase; `step_seconds`: durations of the latest steps, needed for the phase STEP."""
        if phase != STEP:
            return PHASES[phase]
        return min(self.factor * statistics.median(step_seconds) + (self.grace or 0.0), self._longest)

    @property
    def process_group(self) -> timedelta:
        return timedelta(seconds=self._longest + MARGIN + self.slow_compiler * COMPILER_SECONDS)

    @property
    def _longest(self) -> float:
        return max(PHASES.values()) + (self.grace or 0.0)
