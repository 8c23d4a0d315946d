"""Trackio: a local database in TRACKIO_DIR (`trackio show`), or a Space named by TRACKIO_SPACE_ID."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from tasks.tracking.protocol import State, TrackedRun


class TrackioTracker:
    def start(self, run: TrackedRun) -> str:
        import trackio

        # Trackio resumes a run by its name, which must therefore be unique.
        name = run.identifier if run.resumes else f"{run.name}-{run.identifier[:6]}"
        config = {**run.config, **run.labels, "tags": list(run.tags)}
        self._run = trackio.init(
            run.project,
            name,
            config=config,
            resume="allow",
            space_id=os.environ.get("TRACKIO_SPACE_ID"),
            embed=False,
            # Off: the metrics have the load of the ranks' devices; this process's machine may be another.
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        return name

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def flush(self) -> None:
        pass  # Trackio sends in a separate thread

    def artifact(self, path: Path, kind: str) -> None:
        import trackio

        artifact = trackio.Artifact(f"{self._run.name}-{kind}", type=kind)
        artifact.add_file(str(path))
        self._run.log_artifact(artifact)

    def finish(self, state: State) -> None:
        self._run.finish()
