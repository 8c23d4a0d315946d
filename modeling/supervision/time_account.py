"""Time account of a run: how long its devices trained, compiled, evaluated and saved.

Each training row of metrics.jsonl has `time`, when it was written, and the totals since the run's first step (TOTALS). When
training resumes or is rolled back, rows of later steps are dropped and the totals are reset accordingly; RUN/attempts.jsonl
records the dropped time. So all time is counted exactly once, and one metrics row has a run's totals. Rows of attempts.jsonl:

    submitted   a job was given to the launcher, by the flow
    started     its ranks are ready to train: when the job began, seconds to restore the checkpoint, the last row and the totals
                that were dropped
    rollback    seconds to restore the checkpoint, and the totals that were dropped
    ended       the last step is saved, or training was stopped: what followed the last row

tasks/fleet/goodput.py computes the run's goodput from them.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

import psutil

from profiles.files import run_files, state_files

# environment variable of ranks: when their job's torchrun began, in seconds since 1970
BEGUN = "TRAINSHED_BEGUN"
TOTALS = (
    "trained_seconds",  # steps, without the totals below
    "skipped_seconds",  # steps whose update was skipped
    "compile_seconds",  # by which a process's first step exceeded its second
    "evaluation_seconds",
    "checkpoint_seconds",  # during which training waited
)


class TimeAccount:
    """A run's totals: earlier attempts' up to the step it resumes after (`restart`), and this process's."""

    def __init__(self) -> None:
        self._totals = dict.fromkeys(TOTALS, 0.0)
        self._in_step = 0.0  # seconds of other phases since the next step was queued
        self._first: float | None = None  # seconds of the first step, until the second is finished
        self._steps = 0  # finished by this process

    @property
    def totals(self) -> dict[str, float]:
        return {name: round(seconds, 6) for name, seconds in self._totals.items()}

    def restart(self, row: Mapping[str, Any] | None) -> dict[str, float]:
        """Reset the totals to those of a metrics row, or to zero for None; returns the dropped time."""
        before, self._totals = self._totals, totals_of(row)
        self._first = None
        return _difference(before, self._totals)

    def since(self, totals: Mapping[str, float]) -> dict[str, float]:
        """The time added since these totals."""
        return _difference(self._totals, totals)

    def step(self, seconds: float, *, skipped: bool) -> None:
        self._steps += 1
        seconds, self._in_step = max(0.0, seconds - self._in_step), 0.0
        self._totals["skipped_seconds" if skipped else "trained_seconds"] += seconds
        if self._steps == 1 and not skipped:
            self._first = seconds
        elif self._first is not None:
            compiling, self._first = max(0.0, self._first - seconds), None
            self._totals["trained_seconds"] -= compiling
            self._totals["compile_seconds"] += compiling

    @contextlib.contextmanager
    def phase(self, name: str, *, in_step: bool = False) -> Iterator[None]:
        """Add the block's time; `in_step`: the next step was queued before, so its seconds include the block."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self.add(name, time.monotonic() - begun, in_step=in_step)

    def add(self, name: str, seconds: float, *, in_step: bool = False) -> None:
        self._totals[name] += seconds
        if in_step:
            self._in_step += seconds


def _difference(after: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    return {name: round(after[name] - before[name], 6) for name in TOTALS}


def totals_of(row: Mapping[str, Any] | None) -> dict[str, float]:
    """The totals in a metrics row; zeros without one, or in a row of an earlier version."""
    return {name: float((row or {}).get(name, 0.0)) for name in TOTALS}


def record_attempt(run: Path, event: str, **facts: Any) -> None:
    """Append a row to RUN/attempts.jsonl; `facts` may override `time`. A write error only loses the row."""
    row = {"event": event, "time": round(time.time(), 3), **facts}
    with contextlib.suppress(OSError):
        state_files.append_line(run / run_files.ATTEMPTS, json.dumps(row))


def job_begin() -> float:
    """When this rank's job began on its node, in seconds since 1970."""
    with contextlib.suppress(KeyError, ValueError):
        return float(os.environ[BEGUN])
    return psutil.Process().create_time()


def usual_step(rows: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The latest training row whose step took about as long as steps usually do.

    None with fewer than two rows.

    A process's first step includes warm-up, such as compiling, and is among the rows after a start or a resume. So the usual one
    of two is the faster one, and of more the (lower) median.
    """
    timed = sorted((row for row in rows if "step_seconds" in row), key=itemgetter("step_seconds"))
    return timed[(len(timed) - 1) // 2] if len(timed) > 1 else None
