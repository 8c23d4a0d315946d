"""The `Tracker` protocol, implemented here or in a user's own module, named as `module:Class`.

A tracker is created without arguments, in a separate process with the user's working folder, and used by one thread. It may
block or fail: training does not wait for it. A call that raises is retried with the same rows until it succeeds or the run ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

State = Literal["finished", "failed", "stopped"]


@dataclass(frozen=True)
class TrackedRun:
    """Description of the run for a tracker."""

    name: str
    project: str
    folder: Path  # for the tracker's own files, in the run folder
    config: Mapping[str, Any]  # the resolved profile by key path, such as train.steps
    labels: Mapping[str, str]  # profile, parent (of a fork) and cluster
    tags: tuple[str, ...]  # the user's own
    identifier: str  # what `start` returned if `resumes`, else a new unique one that the tracker may use
    resumes: bool  # whether an earlier process has opened this run
    report: Callable[[Exception], None]  # logs an error that a retry would not help, in place of raising it


class Tracker(Protocol):
    """Receives a run's metrics and files, and sends them to an experiment tracker."""

    def start(self, run: TrackedRun) -> str:
        """Open the run, or resume it; returns the identifier with which a later process resumes it."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add a step's metrics by TensorBoard tag; steps ascend, but repeat after a rollback or resume."""

    def flush(self) -> None:
        """Send what was logged; called after every few rows."""

    def artifact(self, path: Path, kind: str) -> None:
        """Attach a file; `kind` is profile, report or comparison."""

    def finish(self, state: State) -> None:
        """Send what is left and close the run; a run that has not finished may be resumed later."""
