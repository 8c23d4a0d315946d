"""The trackers `wandb`, `mlflow` and `trackio`, each a client of the package of its name."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.tracking.protocol import State, TrackedRun

WANDB_TAG = 64  # characters of a tag at most
# Limits of one request to MLflow.
MLFLOW_METRICS = 1000
MLFLOW_PARAMETERS = 100
MLFLOW_LENGTH = 5000  # of a parameter's value
IDENTIFIER = "trainshed.identifier"  # tag by which a run of MLflow is found whose creation was not answered
STATES = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}  # of MLflow


class WandbTracker:
    """Weights & Biases, configured by WANDB_MODE, WANDB_ENTITY, WANDB_API_KEY, … or `wandb login`.

    With WANDB_MODE=offline, runs are written to the run folder, trackers/wandb/offline-run-*; `wandb sync` uploads them.
    """

    def start(self, run: TrackedRun) -> str:
        import wandb

        # Off: the metrics have the load of the ranks' devices; this process's machine may be another.
        settings = wandb.Settings(x_disable_stats=True, console="off", silent=True)
        labels = [f"{name}:{value}"[:WANDB_TAG] for name, value in run.labels.items()]
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


class MlflowTracker:
    """MLflow: a server or a database, named by MLFLOW_TRACKING_URI, for instance sqlite:///mlflow.db."""

    def start(self, run: TrackedRun) -> str:
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient()
        self._metrics: list[Any] = []
        if run.resumes:
            self._run = run.identifier
            self._client.update_run(self._run, status="RUNNING")
            return self._run
        experiment = self._client.get_experiment_by_name(run.project)
        number = experiment.experiment_id if experiment else self._client.create_experiment(run.project)
        found = self._client.search_runs([number], f"tags.`{IDENTIFIER}` = '{run.identifier}'", max_results=1)
        if not found:
            tags = {**run.labels, **dict.fromkeys(run.tags, "true"), IDENTIFIER: run.identifier}
            found = [self._client.create_run(number, run_name=run.name, tags=tags)]
        self._run = found[0].info.run_id
        self._send_parameters(run)
        return self._run

    def _send_parameters(self, run: TrackedRun) -> None:
        """Send the config; an error is reported and not raised, because metrics do not depend on it.

        Parameters cannot be changed later: a run that is extended has its latest values in the artifact profile.yaml.
        """
        from mlflow.entities import Param

        parameters = [Param(key, str(value)[:MLFLOW_LENGTH]) for key, value in run.config.items()]
        try:
            for start in range(0, len(parameters), MLFLOW_PARAMETERS):
                self._client.log_batch(self._run, params=parameters[start : start + MLFLOW_PARAMETERS])
        except Exception as error:  # after the retries of MLflow's client
            run.report(error)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._metrics += [Metric(name, float(value), now, step) for name, value in metrics.items()]

    def flush(self) -> None:
        metrics, self._metrics = self._metrics, []  # rows that cannot be sent are logged again
        for start in range(0, len(metrics), MLFLOW_METRICS):
            self._client.log_batch(self._run, metrics=metrics[start : start + MLFLOW_METRICS])

    def artifact(self, path: Path, kind: str) -> None:
        self._client.log_artifact(self._run, str(path), kind)

    def finish(self, state: State) -> None:
        self._client.set_terminated(self._run, STATES[state])


class TrackioTracker:
    """Trackio: a local database in TRACKIO_DIR (`trackio show`), or a Space named by TRACKIO_SPACE_ID."""

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
