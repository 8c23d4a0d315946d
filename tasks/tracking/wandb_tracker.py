"""Weights & Biases, configured by WANDB_MODE, WANDB_ENTITY, WANDB_API_KEY, … or `wandb login`.

With WANDB_MODE=offline, runs are written to the run folder, trackers/wandb/offline-run-*; `wandb sync` uploads them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from tasks.tracking.protocol import State, TrackedRun

MAX_TAG = 64  # characters


class WandbTracker:
    def start(self, run: TrackedRun) -> str:
        import wandb

        # Off: the metrics have the load of the ranks' devices; this process's machine may be another.
        settings = wandb.Settings(x_disable_stats=True, console="off", silent=True)
        labels = [f"{name}:{value}"[:MAX_TAG] for name, value in run.labels.items()]
        self._run = wandb.init(
            project=run.project,
            id=run.identifier,
            name=run.name,
            resume="allow",
            tags=None if run.resumes else [*labels, *run.tags],
            dir=os.environ.get("WANDB_DIR") or run.folder,
            settings=settings,
        )
        self._run.config.update(dict(run.config), allow_val_change=True)
        # Its own x axis: W&B's built-in step cannot decrease, as it does after a rollback.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        return run.identifier

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def flush(self) -> None:
        pass  # W&B sends in a separate process

    def artifact(self, path: Path, kind: str) -> None:
        import wandb

        artifact = wandb.Artifact(f"{kind}-{self._run.id}", type=kind)
        artifact.add_file(str(path), path.name)
        self._run.log_artifact(artifact)

    def finish(self, state: State) -> None:
        self._run.finish(exit_code=0 if state == "finished" else 1)
