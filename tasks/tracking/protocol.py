"""The `Tracker` protocol: what a tracker implements, here or in a module of a user's own, named as `module:Class`.

A tracker is created without arguments and used by one thread of a process of its own, the working folder being the user's. It
may block and fail as it likes: training does not wait for it. A call that raises is made again, with the same rows, until it
succeeds or the run ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

State = Literal["finished", "failed", "stopped"]


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told about the run."""

    name: str
    project: str
    folder: Path  # for the tracker's own files, in the run folder
    config: Mapping[str, Any]  # the resolved profile by key path, such as train.steps
    labels: Mapping[str, str]  # profile, parent (of a fork) and cluster
    tags: tuple[str, ...]  # the user's own
    identifier: str  # the tracker's name for this run if `resumes`, else a new unique one that it may take
    resumes: bool  # whether an earlier process has opened this run


class Tracker(Protocol):
    def start(self, run: TrackedRun) -> str:
        """Open the run, or resume it; returns the identifier by which a later process resumes it."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add metrics of a step, by TensorBoard tag; steps ascend, except after a rollback or resume, when they are repeated."""

    def flush(self) -> None:
        """Send what was logged; called after every few rows."""

    def artifact(self, path: Path, kind: str) -> None:
        """Attach a file; `kind` is profile, report or comparison."""

    def finish(self, state: State) -> None:
        """Close the run, which may be resumed unless it has finished; sends what is left."""
