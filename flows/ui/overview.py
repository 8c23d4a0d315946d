"""The page of a run in Prefect's UI: where it failed, what happened and what to do next; the loss so far, the plan, the places.

Made from the run's folder alone, so every step can renew it. The curve is a picture inside of the text (an SVG of some kB).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from uuid import UUID

from flows.ui.artifacts import Shown
from modeling.planning.planner import Plan
from profiles.errors import ProfileError
from profiles.schema import Profile
from tasks.reporting.chart import svg_data_uri
from tasks.reporting.format import format_bytes, format_count, format_duration
from tasks.reporting.history import History
from tasks.store.runs import read_events

KEY = "run"
PLAN = "plan.json"
EVENTS = 5  # of the newest that are shown
TENSORBOARD = "http://127.0.0.1:6006"


class Overview:
    """The page of one flow run."""

    def __init__(self, profile: Profile, folder: Path, flow_run: UUID | None = None) -> None:
        self._profile, self._folder = profile, folder
        self._shown = Shown("markdown", KEY, "What this run does, and how it is doing", flow_run)

    def begin(self, planned: Plan) -> None:
        """Keep the plan with the run, and show the page for the first time."""
        (self._folder / PLAN).write_text(json.dumps(planned.to_json(), indent=1))
        self.show(now=True)

    def show(self, *, now: bool = False) -> None:
        """Renew the page, every few seconds at most."""
        self._shown.show(lambda: markdown(self._profile, self._folder), now=now)

    def fail(self, failure: BaseException, saved: Sequence[int]) -> None:
        """Put a failure first; `saved` are the steps of complete checkpoints. Raises what keeps the rest from being made."""
        first = failed(failure, self._folder / "logs", saved)
        rest = markdown(self._profile, self._folder)
        self._shown.show(lambda: f"{first}\n\n{rest}", now=True)


def markdown(profile: Profile, folder: Path) -> str:
    """The page's text."""
    history = History.read(folder)
    parts = []
    steps = profile.train.steps
    if history.steps:
        last = history.steps[-1]
        place = (
            f"Step {last['step']:,} of {steps:,}" if last["step"] < steps else f"All {steps:,} steps are done"
        )
        parts.append(f"## {place}, loss {last['loss']:.4f}")
        drawn = svg_data_uri(history.loss_series(), x_label="step")
        parts.append(f"![Loss by step, {last['loss']:.4f} at the last one]({drawn})" if drawn else "")
        usual, seconds = history.median("tokens_per_second"), history.median("step_seconds")
        if usual and seconds:
            left = (
                f", {format_duration(seconds * (steps - last['step']))} left" if last["step"] < steps else ""
            )
            parts.append(f"{usual:,.0f} tokens a second, {seconds:.3g} s a step{left}")
    else:
        parts.append(f"## {profile.name}: {steps:,} steps to train")
    parts += [_plan(folder), _incidents(folder), _places(profile, folder)]
    return "\n\n".join(part for part in parts if part)


def failed(failure: BaseException, logs: Path | None = None, saved: Sequence[int] = ()) -> str:
    """What happened, in the failure's own words, and what to do next."""
    text = str(failure) or type(failure).__name__
    parts = ["# Failed", f"**What happened:** {_plain(text)}"]
    detail = getattr(failure, "detail", "")
    if detail:
        parts.append("```\n" + "\n".join(str(detail).splitlines()[-12:]).replace("```", "'''") + "\n```")
    parts.append(f"**What to do next:** {_advice(failure, logs, saved)}")
    return "\n\n".join(parts)


def _advice(failure: BaseException, logs: Path | None, saved: Sequence[int]) -> str:
    if isinstance(failure, ProfileError):
        change = f", for instance to `{failure.choices[0]}`" if failure.choices else ""
        return f"change `{failure.key}`{change}, and start the run again. What is done already is not done twice."
    on = (
        f"goes on from step {max(saved):,}, its newest checkpoint"
        if saved
        else "does only what is not done yet"
    )
    advice = (
        f"mend what the message names, then **Retry** this run here, or run the same command again: it {on}."
    )
    if logs:
        advice += f" The programs' own logs are in `{logs}`."
    return advice


def _plan(folder: Path) -> str:
    path = folder / PLAN
    if not path.exists():
        return ""
    plan = json.loads(path.read_text())
    fullest = max(sum(stage["bytes"].values()) for stage in plan["stages"])
    rows = {
        "parameters": f"{plan['parameters']:,}",
        "mesh": " × ".join(f"{axis} {size}" for axis, size in plan["mesh"].items()),
        "tokens": format_count(plan["tokens"]) if plan["tokens"] else "as many as its data has",
        "fullest rank": f"{format_bytes(fullest)} of {format_bytes(plan['device_bytes'])}",
    }
    if plan.get("step_seconds"):
        rows["time a step"] = f"{plan['step_seconds']:.3g} s"
        rows["tokens a second"] = f"{plan['tokens_per_second']:,.0f}"
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return f"## The plan\n\n| | planned |\n|---|---|\n{table}"


def _incidents(folder: Path) -> str:
    lines = []
    for event in read_events(folder)[-EVENTS:]:
        place = f"step {event['step']:,}: " if "step" in event else ""
        lines.append(f"- {place}{event['event']}: {_plain(event.get('reason', ''))}")
    return "## Incidents\n\n" + "\n".join(lines) if lines else ""


def _places(profile: Profile, folder: Path) -> str:
    command = (
        f"trainshed tensorboard {shlex.quote(profile.name)} --store {shlex.quote(str(folder.parents[1]))}"
    )
    lines = [f"- the run's folder: `{folder}`"]
    made = {"report": folder / "report.html", "model": folder / "export"}
    lines += [f"- {name}: `{path}`" for name, path in made.items() if path.exists()]
    lines.append(f"- TensorBoard: `{command}`, then [{TENSORBOARD}]({TENSORBOARD})")
    return "## Where it is\n\n" + "\n".join(lines)


def _plain(text: str) -> str:
    """A text that Markdown leaves as it is, in one line."""
    return "".join(f"\\{mark}" if mark in "\\`*_{}[]<>#|!" else mark for mark in " ".join(text.split()))
