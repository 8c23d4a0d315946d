"""Outcomes of a flow's steps, and a run's validation loss, from which all screens and pages read them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from profiles.files import run_files

AFTER_TRAINING = ("evaluate", "export", "report")  # steps of a run


@dataclass(frozen=True)
class Outcome:
    """How a step of a flow ended."""

    step: str
    how: str  # "running", "done", "cached", "skipped", "stopped" or "failed"
    # Duration; of a cached step, the time its artifact took when it was made; None if unknown.
    seconds: float | None
    note: str = ""  # one line for the reader, for example why a step was skipped
    summary: Mapping[str, Any] = field(default_factory=dict)  # summary of the step's artifact
    retries: int = 0  # failed attempts before this one


def run_result(
    folder: Path, export: str, report: str, evaluated: Mapping[str, Any], before: Mapping[str, Any] | None
) -> dict[str, Any]:
    """What a flow returns of a finished run: final metrics, and paths of the outputs.

    Args:
        export: the part of the run folder with the exported model.
        evaluated: summary of the final evaluation.
        before: summary of the evaluation of the initial weights; None without one.
    """
    names = ("validation_loss", "perplexity", "metrics")
    return {
        "run": folder.name,
        "folder": str(folder),
        "export": str(folder / export),
        "metrics": str(folder / run_files.METRICS),
        "report": report,
        "validation_loss": evaluated["validation_loss"],
        "perplexity": evaluated["perplexity"],
        "evaluation": {name: evaluated[name] for name in names},
        "before": before and {name: before[name] for name in names},
    }


def final_evaluation(report: Mapping[str, Any], steps: int | None) -> Mapping[str, Any] | None:
    """The evaluation in a run's report.json.

    None if it is not of the last step, as after extending the run.

    A run's validation loss is that of this evaluation, on the whole validation split. Evaluations during training, in
    metrics.jsonl, are on a subset of it (`validation_in_training`).
    """
    evaluation = report.get("evaluation")
    if not isinstance(evaluation, Mapping) or evaluation.get("step") not in (None, steps):
        return None  # reports of early versions have no step
    return evaluation


def is_finished(
    report: Mapping[str, Any] | None, alerts: Mapping[str, Any] | None, last: int | None, steps: int | None
) -> bool:
    """Whether a run is finished, if no flow is running it and no step has failed since.

    Args:
        report: report.json, which a flow writes last; None if there is none: flows that train proxies of a share, or end with an
            earlier step (`--until`), write none.
        alerts: alerts.json, where a flow that ends without an error records the steps, and one that begins whether it writes a
            report; None if there is none.
        last: step of its last training row; None without one. A run that has lost its last checkpoint trains its last steps
            again, although it has a report of them.
        steps: that it trains.
    """
    trained = last is not None and steps is not None and last >= steps
    if report is None:
        recorded = alerts or {}
        return trained and recorded.get("steps") == steps and not recorded.get("reports")
    return (trained or last is None) and bool(final_evaluation(report, steps))


def latest_failure(events: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The last event in events.jsonl of a step that failed after training; None without one.

    Of a round, it may be the evaluation of the promoted model before training.
    """
    names = [f"{step} failed" for step in AFTER_TRAINING]
    return next((event for event in reversed([*events]) if event["event"] in names), None)


def validation_in_training(row: Mapping[str, Any] | None, finished: int | None = None) -> float | None:
    """Loss of the latest evaluation in metrics.jsonl, given its row; None without one.

    An evaluation of the initial weights, in the row of step 0, says nothing about the run, and one before the last step of a
    finished run, `finished`, is not its result: a fork's may even be its parent's.
    """
    return (
        None if row is None or row["step"] == 0 or row["step"] < (finished or 0) else row["validation_loss"]
    )
