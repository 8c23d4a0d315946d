"""Ladder: train small runs of a target's family, several at a time, to forecast the target's loss.

    plan ─> rung ┐
            rung ├─> forecast ─> target, if asked for
            rung ┘

Each rung is an ordinary run of the pretraining flow, so finished ones are cached and interrupted ones resume; adding a rung
trains only that rung. The forecast is in the store before the target starts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefect import flow

from flows.experiments.plans import load_ladder, require_startable
from flows.experiments.side_by_side import file_name, run_side_by_side, train_alone
from flows.final_states import final_states
from flows.hooks import EXPERIMENT_HOOKS
from flows.runner import log_result
from modeling.scaling.planned_run import PlannedRun, warnings_of
from tasks.experiments import forecasts, json_artifacts
from tasks.reporting import html, ladder_page
from tasks.store.store import open_store

log = logging.getLogger(__name__)


@flow(name="ladder", flow_run_name=file_name, **EXPERIMENT_HOOKS)
@final_states
def ladder(file: str, store: str = "./store", target: bool = False) -> dict[str, Any]:
    """Train the rungs of a ladder and forecast its target; returns the forecast and the path of its page.

    Args:
        file: The ladder file.
        store: Where artifacts and runs are kept: a folder or an s3:// prefix.
        target: Also train the target, once the forecast is in the store.
    """
    described, goal, rungs, _ = load_ladder(file)
    require_startable([*rungs, goal] if target else rungs)
    for warning in warnings_of(goal, rungs):
        log.warning("warning: %s", warning)
    opened = open_store(store, goal.profile.cluster.work_dir or "store")
    results = run_side_by_side(described, rungs, store)
    losses = [result["validation_loss"] for result in results]
    metrics = [_metrics(rung, result) for rung, result in zip(rungs, results, strict=True)]
    artifact = forecasts.write_forecast(opened, goal, rungs, losses, metrics)
    document = json_artifacts.read(opened, artifact)
    log_result(forecasts.in_words(goal.name, document))
    for warning in document.get("warnings", ()):  # absent in forecasts of earlier versions
        log.warning("warning: %s", warning)
    path = opened.work_dir / "ladders" / f"{described.name}.html"
    page = html.write(path, ladder_page.render(described, document))
    result = {"ladder": described.name, "key": artifact.key, "page": str(page), **document}
    if target:
        trained = train_alone(goal, store)
        result["report"] = trained["report"]
        recorded = forecasts.read_recorded(opened.run_folder(trained["run"]))
        if recorded is None:
            log.warning("warning: %s was started before its forecast", trained["run"])
        else:  # an earlier forecast, if the target has started since
            loss, reached = trained["validation_loss"], _metrics(goal, trained)
            result["outcome"] = forecasts.outcome(recorded, goal.tokens, loss, reached)
            if result["outcome"] is None:
                log.warning(
                    "warning: %s was extended after its forecast, which is not compared", trained["run"]
                )
    return result


def _metrics(run: PlannedRun, result: Mapping[str, Any]) -> dict[str, float]:
    """Metrics of a finished run, from the result of its flow."""
    metrics, steps = result["evaluation"]["metrics"], run.profile.train.last_step
    return forecasts.metrics_of(Path(result["folder"]), metrics, steps)
