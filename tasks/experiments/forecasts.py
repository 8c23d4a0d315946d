"""Immutable forecasts, written before the target starts and compared with the outcome in its report.

A forecast is an artifact whose key covers the target's settings and the rungs' results; its manifest and forecast.json record
when it was written. A run that starts copies the latest forecast of its settings into its folder; later forecasts are never
compared with its outcome.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from modeling.scaling import forecast as forecasts
from modeling.scaling.fit import Observation
from modeling.scaling.metrics import forecast_metrics
from modeling.scaling.planned_run import PlannedRun
from profiles.errors import ProfileError
from profiles.files import run_files, state_files
from profiles.schema import Profile
from tasks import keys
from tasks.evaluation import results
from tasks.experiments import json_artifacts
from tasks.store.artifacts import Artifact, ArtifactId
from tasks.store.run_folder import RunFolder
from tasks.store.store import Store

log = logging.getLogger(__name__)

KIND = "forecast"
SHOWN = ("key", "written", "loss", "interval", "share", "extrapolation")  # in a run's report
TYPES = {"target": dict, "written": str, "loss": int | float, "interval": list, "metrics": dict}


def metrics_of(folder: Path, metrics: Mapping[str, float], step: int) -> dict[str, float]:
    """Metrics at the run's last step, from its evaluation and from tasks evaluated since."""
    later = results.read(folder).get(step, {})
    return {name: value for name, value in {**later, **metrics}.items() if name != "validation_loss"}


def write_forecast(
    store: Store,
    target: PlannedRun,
    rungs: Sequence[PlannedRun],
    losses: Sequence[float],
    metrics: Sequence[Mapping[str, float]],
) -> Artifact:
    """Fit the rungs' losses and write the target's forecast, unless the store has it.

    Args:
        metrics: each rung's metrics by name; only those that a fit supports are forecast.

    Raises:
        ProfileError: the law cannot be fitted to these rungs.
    """
    observations = [
        Observation(rung.n, rung.tokens, loss, rung.name) for rung, loss in zip(rungs, losses, strict=True)
    ]
    settings = keys.forecast_target(target.profile)
    fitted = [[point.n, point.d, point.loss] for point in observations]
    key = keys.forecast(settings, fitted, metrics)

    def compute() -> dict[str, Any]:
        try:
            found = forecasts.forecast(observations, target.n, target.tokens)
        except ValueError as error:
            raise ProfileError("rungs", None, str(error)) from error
        supported, without = forecast_metrics(observations, metrics, target.n, target.tokens)
        points = [
            {"name": rung.name, **asdict(point), "flops": point.flops}
            for rung, point in zip(rungs, observations, strict=True)
        ]
        return {"rungs": points, **found, "metrics": supported, "metrics_without_forecast": without}

    facts = {"name": target.name, "settings": settings, "n": target.n, "tokens": target.tokens}
    summary = ("loss", "interval", "share", "extrapolation")
    return json_artifacts.get_or_create(store, ArtifactId(KIND, key), facts, compute, summary)


def latest(store: Store, profile: Profile) -> Artifact | None:
    """The latest forecast of a run with these settings; None without one."""
    settings = keys.forecast_target(profile)
    found = filter(None, store.artifacts.find_many(sorted(store.artifacts.list_files(KIND))))
    of_target = [artifact for artifact in found if artifact.summary["settings"] == settings]
    return max(of_target, key=lambda artifact: artifact.summary["written"], default=None)


def read_recorded(run: RunFolder) -> dict[str, Any] | None:
    """The forecast that was copied into a run's folder when the run started.

    None if there was none, and None with a warning if it is corrupted.
    """
    known = run.read(run_files.FORECAST)
    return parse(known, run.location(run_files.FORECAST)) if known else None


def parse(data: str | bytes, location: Path | str) -> dict[str, Any] | None:
    """The forecast in a file's contents; None with a warning if it is corrupted."""
    found = state_files.parse_json(data, location, TYPES, (*SHOWN, "target"))
    if found is None:
        return None
    metrics = found.get("metrics", {}).values()  # absent from forecasts of earlier versions
    intervals = [found["interval"], *(row.get("interval") for row in metrics if isinstance(row, dict))]
    if "tokens" in found["target"] and all(map(_is_interval, intervals)):
        return found
    log.warning("%s: corrupted; ignored", location)
    return None


def _is_interval(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(end, int | float) for end in value)


def record(store: Store, profile: Profile, run: RunFolder) -> dict[str, Any] | None:
    """Copy the latest forecast into the folder of an untrained run; returns the recorded one, if any."""
    if known := read_recorded(run):
        return known
    if run.checkpoint_steps() or state_files.exists(run.path / run_files.METRICS):
        return None
    artifact = latest(store, profile)
    if artifact is None:
        return None
    document = {"key": artifact.key, **json_artifacts.read(store, artifact)}
    run.write(run_files.FORECAST, json.dumps(document, indent=1).encode())
    return document


def in_words(run: str, forecast: Mapping[str, Any]) -> str:
    """A forecast's loss and interval in one line."""
    low, high = forecast["interval"]
    interval = f"{forecast['share']:.0%} interval {low:.4f} to {high:.4f}"
    return f"forecast of {run}: loss {forecast['loss']:.4f}, {interval}"


def outcome(
    forecast: Mapping[str, Any], tokens: int, loss: float, metrics: Mapping[str, float] | None = None
) -> dict[str, Any] | None:
    """Compare a forecast with the loss and metrics that the run reached after training on `tokens`.

    None if the forecast is for another length: the run was extended after it was made.
    """
    if forecast["target"]["tokens"] != tokens:
        return None
    low, high = forecast["interval"]
    return {
        **{name: forecast[name] for name in SHOWN},
        "outcome": loss,
        "error": forecast["loss"] / loss - 1,
        "within": low <= loss <= high,
        "metrics": {
            name: {
                **row,
                "outcome": metrics[name],
                "within": row["interval"][0] <= metrics[name] <= row["interval"][1],
            }
            for name, row in forecast.get("metrics", {}).items()  # absent from forecasts of earlier versions
            if metrics and name in metrics
        },
    }
