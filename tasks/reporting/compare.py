"""Several runs side by side: what each came to, where their profiles differ, and their losses in one chart.

Reads the runs' folders alone, so a run that still trains, or failed, can be compared too.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from profiles import resolve
from profiles.errors import ProfileError, shown
from profiles.schema import Profile
from tasks.report import FACTS, measured
from tasks.reporting import html
from tasks.reporting.chart import Series, line_chart
from tasks.reporting.format import duration, in_bytes, in_words
from tasks.reporting.history import SMOOTHING, History, smoothed
from tasks.store.store import Store

LINES = 6  # colours that report.html has for lines
UNKNOWN = "–"
FIGURES = {  # name: (key, how it is shown); "_" keys are of the report, which a run has at its end
    "state": ("state", str),
    "parameters": ("parameters", in_words),
    "steps": ("steps", "{:,}".format),
    "tokens": ("tokens", in_words),
    "training loss": ("loss", "{:.4f}".format),
    "validation loss": ("validation_loss", "{:.4f}".format),
    "perplexity": ("perplexity", "{:,.1f}".format),
    "time a step": ("step_seconds", "{:.3g} s".format),
    "tokens a second": ("tokens_per_second", "{:,.0f}".format),
    "MFU": ("mfu", "{:.1%}".format),
    "memory": ("memory_bytes", in_bytes),
    "training time": ("training_seconds", duration),
    "skipped steps": ("skipped", "{:,}".format),
}


def load(store: Store, named: Sequence[str]) -> list[dict[str, Any]]:
    """Facts of runs, given by name or by folder: run, folder, profile (flat, by key path), and what FIGURES names.

    Raises:
        ProfileError: no such run, or its report is damaged.
    """
    return [_facts(_folder(store, name)) for name in named]


def differences(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Key paths of the profiles whose values are not the same in all runs, with each run's value."""
    paths = sorted({path for run in runs for path in run["profile"]})
    values = {path: [run["profile"].get(path) for run in runs] for path in paths}
    return {path: each for path, each in values.items() if any(value != each[0] for value in each)}


def rows(runs: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """The table: a row a figure that any run has, then one a key that differs; the first cell is its name."""
    found = []
    for name, (key, show) in FIGURES.items():
        values = [run.get(key) for run in runs]
        if any(value is not None for value in values):
            found.append((name, *(UNKNOWN if value is None else show(value) for value in values)))
    for path, each in differences(runs).items():
        found.append((path, *(UNKNOWN if value is None else shown(value) for value in each)))
    return found


def write(runs: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """The page of the comparison."""
    lines, held_out = [], []
    for number, run in enumerate(runs):
        style = f"line-{number % LINES + 1}"
        history = History.read(Path(run["folder"]))
        losses = history.curve("loss")
        lines.append(Series(run["run"], style, smoothed(losses) if len(losses) > 2 * SMOOTHING else losses))
        held_out.append(Series(run["run"], style, history.curve("validation_loss"), dots=True))
    names = [run["run"] for run in runs]
    sections = [
        html.section("Side by side", html.grid(("", *names), rows(runs))),
        html.section("Training loss", line_chart(lines, x_label="step", y_label="loss")),
        html.section("Validation loss", line_chart(held_out, x_label="step", y_label="validation loss")),
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(html.page(" and ".join(names), f"{len(runs)} runs compared", sections))
    return path


def _folder(store: Store, name: str) -> Path:
    folder = Path(name) if "/" in name else store.run_folder(name).path
    if (folder / "profile.yaml").is_file():
        return folder
    runs = folder.parent
    known = sorted(path.parent.name for path in runs.glob("*/profile.yaml"))
    raise ProfileError(
        "run", name, f"there is no such run in {runs}", difflib.get_close_matches(name, known) or known[:3]
    )


def _facts(folder: Path) -> dict[str, Any]:
    profile = resolve.load(str(folder / "profile.yaml"))
    history = History.read(folder)
    found: dict[str, Any] = {"run": folder.name, "folder": str(folder), "profile": _shaping(profile)}
    found |= measured(profile, history)
    if history.evaluations:
        found["validation_loss"] = history.evaluations[-1]["validation_loss"]
    found["state"] = f"at step {len(history.steps):,} of {profile.train.steps:,}"
    if (folder / FACTS).is_file():
        found |= {"state": "finished", **_reported(folder / FACTS)}
    return found


def _reported(path: Path) -> dict[str, Any]:
    """What the report adds to the metrics."""
    try:
        report = json.loads(path.read_text())
        found = {"parameters": report["plan"]["parameters"]}
        found |= {name: report["evaluation"][name] for name in ("validation_loss", "perplexity")}
        if not all(isinstance(value, int | float) for value in found.values()):
            raise ValueError("a figure is none")
    except (ValueError, LookupError, TypeError) as error:
        reason = f"its report {path} is damaged; running it again writes it anew"
        raise ProfileError("run", path.parent.name, reason) from error
    return found


def _shaping(profile: Profile) -> dict[str, Any]:
    """Of all that shapes a run, the value by key path."""
    values = profile.model_dump(mode="json", by_alias=True)
    return _flat({section: keys for section, keys in values.items() if isinstance(keys, dict)})


def _flat(values: Any, path: str = "") -> dict[str, Any]:
    """'train.steps': 300, 'data.sources.0.kind': 'files', ... of sections and lists of sections within each other."""
    if isinstance(values, dict):
        items = values.items()
    elif isinstance(values, list) and any(isinstance(value, dict) for value in values):
        items = enumerate(values)
    else:
        return {path: values}
    flat = {}
    for name, value in items:
        flat |= _flat(value, f"{path}.{name}" if path else str(name))
    return flat
