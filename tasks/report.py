"""The report of a run: one HTML file that needs no network, light or dark as the reader's system is.

What ran, what became of each step, the loss curves, the evaluation, and how to load the exported model.
"""

from __future__ import annotations

import math
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from importlib.metadata import version
from pathlib import Path
from string import Template
from typing import Any

from profiles.schema import Profile
from tasks.chart import Series, line_chart
from tasks.runs import read_metrics
from tasks.text import duration

SMOOTHING = 10  # steps before and after each that the drawn mean takes in


@dataclass(frozen=True)
class Outcome:
    """What became of a step: `how` is done, cached, skipped or failed; `note` is what to know about it."""

    step: str
    how: str
    seconds: float
    note: str = ""


def run(
    profile: Profile,
    folder: Path,
    plan: Mapping[str, Any],
    evaluation: Mapping[str, Any],
    outcomes: Sequence[Outcome],
) -> Path:
    """Write `<run>/report.html`, whole or not at all, from what lies in the run's folder and what the steps say.

    Args:
        plan: of it, parameters and mesh are shown.
        evaluation: names and numbers, among them validation_loss and perplexity.
    """
    text = (folder / "profile.yaml").read_text()
    figures = {
        "validation loss": f"{evaluation['validation_loss']:.4f}",
        "perplexity": f"{evaluation['perplexity']:.1f}",
        "parameters": f"{plan['parameters']:,}",
        "tokens trained on": f"{profile.train.steps * profile.train.global_batch_size * profile.train.sequence_length:,}",
        "processes": f"{profile.world_size}",
    }
    page = Template(Path(__file__).with_name("report.html").read_text()).substitute(
        title=escape(profile.name),
        description=escape(profile.description),
        figures="".join(f"<div><b>{escape(v)}</b><span>{escape(k)}</span></div>" for k, v in figures.items()),
        steps="".join(map(_step, outcomes)),
        chart=_losses(read_metrics(folder)),
        evaluation=_table({name.replace("_", " "): _number(value) for name, value in evaluation.items()}),
        model=_model(folder / "export"),
        facts=_table({"mesh": _mesh(plan["mesh"]), "written": _now(), **versions()}),
        profile=escape(text),
    )
    path = folder / "report.html"
    partial = path.with_suffix(".partial")
    partial.write_text(page)
    return partial.replace(path)


def versions() -> dict[str, str]:
    """What this ran on: Trainshed (and its commit, in a checkout), torch, Prefect, Python, the system."""
    return {
        "Trainshed": version("trainshed") + _commit(),
        "torch": version("torch"),
        "Prefect": version("prefect"),
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def _mesh(mesh: Mapping[str, int]) -> str:
    return " × ".join(f"{axis} {size}" for axis, size in mesh.items())


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def _commit() -> str:
    home = Path(__file__).parents[1]
    if not (home / ".git").exists():
        return ""
    try:
        found = subprocess.run(
            ["git", "-C", str(home), "describe", "--always", "--dirty"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return f", commit {found.stdout.strip()}" if found.returncode == 0 else ""


def _step(outcome: Outcome) -> str:
    took = f" · {duration(outcome.seconds)}" if outcome.how == "done" else ""
    note = f"<small>{escape(outcome.note)}</small>" if outcome.note else ""
    return (
        f'<li class="{escape(outcome.how)}"><b>{escape(outcome.step)}</b>'
        f"<small>{escape(outcome.how)}{took}</small>{note}</li>"
    )


def _losses(metrics: Sequence[Mapping[str, Any]]) -> str:
    losses = [(row["step"], row["loss"]) for row in metrics if "loss" in row]
    held_out = [(row["step"], row["validation_loss"]) for row in metrics if "validation_loss" in row]
    return line_chart(
        [
            Series("training", "training", losses),
            Series(f"training, mean of {2 * SMOOTHING + 1} steps", "smooth", _smoothed(losses)),
            Series("validation", "validation", held_out, dots=True),
        ],
        x_label="step",
        y_label="loss",
    )


def _smoothed(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Means over the steps around each, so that the curve does not lag."""
    finite = [point for point in points if math.isfinite(point[1])]
    means = []
    for index, (step, _) in enumerate(finite):
        around = finite[max(0, index - SMOOTHING) : index + SMOOTHING + 1]
        means.append((step, sum(loss for _, loss in around) / len(around)))
    return means


def _model(export: Path) -> str:
    code = (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f"folder = {str(export)!r}\n"
        "model = AutoModelForCausalLM.from_pretrained(folder)\n"
        "tokenizer = AutoTokenizer.from_pretrained(folder)\n"
        'tokens = tokenizer("The function returns", return_tensors="pt").input_ids\n'
        "print(tokenizer.decode(model.generate(tokens, max_new_tokens=40)[0]))\n"
    )
    return f"<p>In Hugging Face's format: <code>{escape(str(export))}</code></p><pre>{escape(code)}</pre>"


def _table(rows: Mapping[str, str]) -> str:
    if not rows:
        return "<p>Nothing yet.</p>"
    cells = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows.items()
    )
    return f"<table>{cells}</table>"


def _number(value: Any) -> str:
    return (
        f"{value:.4f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
    )
