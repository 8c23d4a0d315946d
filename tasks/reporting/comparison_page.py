"""Comparison of runs: results, profile keys that differ, and loss curves in one chart.

Reads only files of the run folders, so runs that are still training or have failed can be compared too.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from parallel.checkpoint.locations import Location, complete_checkpoints
from profiles.errors import ProfileError, format_value
from profiles.files import run_files, state_files
from profiles.schema import Profile
from tasks.reporting import html
from tasks.reporting.chart import LINE_STYLES, Series, line_chart
from tasks.reporting.format import (
    format_bytes,
    format_count,
    format_duration,
    format_perplexity,
    format_step_time,
)
from tasks.reporting.history import History
from tasks.reporting.outcome import final_evaluation, is_finished, latest_failure, validation_in_training
from tasks.store.backends.backend import Backend
from tasks.store.runs import existing_run, load_profile, read_events, unknown_local_run, unknown_run
from tasks.store.store import Store

UNKNOWN = "–"
# That are read.
FILES = (run_files.PROFILE, run_files.METRICS, run_files.EVENTS, run_files.REPORT_JSON, run_files.ALERTS)
RESULTS: dict[str, tuple[str, Callable[[Any], str]]] = {  # row: (key of `load_runs`, formatter)
    "state": ("state", str),
    "parameters": ("parameters", format_count),
    "steps": ("steps", "{:,}".format),
    "tokens": ("tokens", format_count),
    "training loss": ("loss", "{:.4f}".format),
    "validation loss": ("validation_loss", "{:.4f}".format),
    "validation, subset": ("last_validation_loss", "{:.4f}".format),
    "perplexity": ("perplexity", format_perplexity),
    "step time": ("step_seconds", format_step_time),
    "tokens per second": ("tokens_per_second", "{:,.0f}".format),
    "MFU": ("mfu", "{:.1%}".format),
    "memory": ("memory_bytes", format_bytes),
    "training time": ("training_seconds", format_duration),
    "skipped steps": ("skipped", "{:,}".format),
}


def load_runs(store: Store, names: Sequence[str]) -> tuple[list[dict[str, Any]], list[History]]:
    """Name, folder, profile (flat, by key path) and results of runs, and their histories.

    Raises ProfileError for an unknown name or folder.
    """
    with tempfile.TemporaryDirectory() as copies:
        found = [_find_folder(store, name, Path(copies)) for name in names]
        histories = [History.read(folder) for folder, *_ in found]
        runs = [_load_run(*run, history) for run, history in zip(found, histories, strict=True)]
    return runs, histories


def profile_differences(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Each run's value of the profile keys on which the runs differ, by key path."""
    paths = sorted({path for run in runs for path in run["profile"]})
    table = {path: [run["profile"].get(path) for run in runs] for path in paths}
    return {path: row for path, row in table.items() if any(value != row[0] for value in row)}


def table_rows(runs: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Rows (name, value of each run): the results that any run has, then the profile keys that differ."""
    rows = []
    for name, (key, show) in RESULTS.items():
        values = [run.get(key) for run in runs]
        if any(value is not None for value in values):
            rows.append((name, *(UNKNOWN if value is None else show(value) for value in values)))
    for path, values in profile_differences(runs).items():
        rows.append((path, *(UNKNOWN if value is None else format_value(value) for value in values)))
    return rows


def render(
    runs: Sequence[Mapping[str, Any]],
    histories: Sequence[History],
    titles: tuple[str, str] | None = None,
    first: Sequence[str] = (),
) -> str:
    """The comparison as an HTML page.

    Args:
        titles: title and subtitle; None names the runs.
        first: sections before those of the comparison.
    """
    smoothed = [history.smoothed_loss() for history in histories]
    all_smooth = all(smoothed)  # a smoothed curve beside another run's raw one would mislead
    training, validation = [], []
    for number, (run, history) in enumerate(zip(runs, histories, strict=True)):
        style = f"line-{number % LINE_STYLES + 1}"
        losses = smoothed[number] if all_smooth else history.curve("loss")
        training.append(Series(run["run"], style, losses))
        validation.append(Series(run["run"], style, history.curve("validation_loss"), dots=True))
    names = [run["run"] for run in runs]
    sections = [
        html.section("Results and differences", html.table(("", *names), table_rows(runs))),
        html.section(
            "Training loss, moving average" if all_smooth else "Training loss",
            line_chart(training, x_label="step", y_label="loss"),
        ),
        html.section(
            "Validation loss in training",
            line_chart(validation, x_label="step", y_label="validation loss in training"),
        ),
    ]
    subtitle = f"Comparison of {len(runs)} runs" if len(runs) > 1 else "Results and loss curves"
    *others, last = names
    title, subtitle = titles or (f"{', '.join(others)} and {last}" if others else last, subtitle)
    return html.page(title, subtitle, [*first, *sections])


def _find_folder(store: Store, name: str, copies: Path) -> tuple[Path, str, Location]:
    """Folder with a run's files, the path or URI of the run, and the location of its checkpoints.

    Files of a remote store are copied to `copies`.
    """
    if store.is_remote and "/" not in name:
        return _copy(store, existing_run(store.existing(), "run", name).name, copies / name)
    folder = Path(name) if "/" in name else store.existing().work_dir / "runs" / name
    if state_files.is_file(folder / run_files.PROFILE):
        return folder, str(folder), folder / run_files.CHECKPOINTS
    raise unknown_local_run(name, folder.parent)


def _copy(store: Store, name: str, folder: Path) -> tuple[Path, str, Location]:
    """Copy the files of a run of a remote store; result as of `_find_folder`."""
    run = f"runs/{name}"

    def changed(backend: Backend) -> float:
        entries = backend.entries(run)
        return max((entries[file].modified for file in FILES if file in entries), default=0.0)

    latest = max(store.backends, key=changed)  # a run that trains on this machine is uploaded once a minute
    state_files.make_folder(folder)
    for file in FILES:
        if (data := latest.read(f"{run}/{file}")) is not None:
            (folder / file).write_bytes(data)
    if not state_files.is_file(folder / run_files.PROFILE):
        raise unknown_run(store, "run", name)
    return folder, latest.location(run), store.run_folder(name).checkpoints_location


def _load_run(folder: Path, location: str, checkpoints: Location, history: History) -> dict[str, Any]:
    profile = load_profile(folder)
    run: dict[str, Any] = {"run": folder.name, "folder": location, "profile": flat_profile(profile)}
    run |= history.measurements(profile)
    report, results = _read_report(folder, location, profile.train.steps)
    finished = profile.train.steps if results else None
    run["last_validation_loss"] = validation_in_training(history.last_evaluation, finished)
    run["state"] = f"at step {history.steps:,} of {profile.train.steps:,}"
    run |= results
    last = history.last["step"] if history.last else None
    alerts = state_files.read_json(folder / run_files.ALERTS) if report is None else None
    if is_finished(report, alerts, last, profile.train.steps):
        saved = profile.train.steps in dict(complete_checkpoints(checkpoints))
        run["state"] = "finished" if saved else f"{run['state']}, without its checkpoint"
    elif history.steps == profile.train.steps and (failure := latest_failure(read_events(folder))):
        run["state"] = failure["event"]
    return run


def _read_report(
    folder: Path, location: str, steps: int | None
) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """The report, None without one, and results that only it has: parameters, loss, perplexity.

    Without results if it is not of the run's last step.
    """
    if not state_files.is_file(folder / run_files.REPORT_JSON):
        return None, {}
    try:
        report = json.loads(state_files.contents(folder / run_files.REPORT_JSON))
        results = {"parameters": report["plan"]["parameters"]}
        results["validation_loss"] = report["evaluation"]["validation_loss"]
        if (perplexity := report["evaluation"]["perplexity"]) is not None:
            results["perplexity"] = perplexity
        if not all(isinstance(value, int | float) for value in results.values()):
            raise ValueError("not a number")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        reason = f"{location}/{run_files.REPORT_JSON} is corrupted; start the run again to rewrite it"
        raise ProfileError("run", folder.name, reason) from error
    return report, results if final_evaluation(report, steps) else {}


def flat_profile(profile: Profile) -> dict[str, Any]:
    """Values of all sections by key path: 'train.steps': 300, 'data.sources.0.kind': 'files', ..."""
    values = profile.model_dump(mode="json", by_alias=True)
    return _flatten({section: keys for section, keys in values.items() if isinstance(keys, dict)})


def _flatten(values: Any, path: str = "") -> dict[str, Any]:
    """Flatten nested dicts and lists of dicts."""
    items: Iterable[tuple[Any, Any]]
    if isinstance(values, dict):
        items = values.items()
    elif isinstance(values, list) and any(isinstance(value, dict) for value in values):
        items = enumerate(values)
    else:
        return {path: values}
    flat: dict[str, Any] = {}
    for name, value in items:
        flat |= _flatten(value, f"{path}.{name}" if path else str(name))
    return flat
