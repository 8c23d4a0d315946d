"""MLflow: a server or a database, named by MLFLOW_TRACKING_URI, for instance sqlite:///mlflow.db."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.tracking.protocol import State, TrackedRun

# Limits of one request.
MAX_METRICS = 1000
MAX_PARAMETERS = 100
MAX_LENGTH = 5000  # of a parameter's value
IDENTIFIER = "trainshed.identifier"  # tag by which a run is found whose creation was not answered
STATES = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}


class MlflowTracker:
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

        parameters = [Param(key, str(value)[:MAX_LENGTH]) for key, value in run.config.items()]
        try:
            for start in range(0, len(parameters), MAX_PARAMETERS):
                self._client.log_batch(self._run, params=parameters[start : start + MAX_PARAMETERS])
        except Exception as error:  # after the retries of MLflow's client
            run.report(error)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._metrics += [Metric(name, float(value), now, step) for name, value in metrics.items()]

    def flush(self) -> None:
        metrics, self._metrics = self._metrics, []  # rows that cannot be sent are logged again
        for start in range(0, len(metrics), MAX_METRICS):
            self._client.log_batch(self._run, metrics=metrics[start : start + MAX_METRICS])

    def artifact(self, path: Path, kind: str) -> None:
        self._client.log_artifact(self._run, str(path), kind)

    def finish(self, state: State) -> None:
        self._client.set_terminated(self._run, STATES[state])
