"""The page of a run in Prefect's UI: where it failed, what happened and what to do next; the loss so far, the plan, the places.

Made from the run's folder alone, so every step can renew it. The curve is a picture inside of the text (an SVG of some kB).
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from uuid import UUID

from flows.artifacts import Shown
from modeling.planner import Plan
from profiles.errors import ProfileError
from profiles.schema import Profile
from tasks import runs
from tasks.chart import picture
from tasks.history import History, read_events
from tasks.text import duration, in_bytes, in_words

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

    def show(self, *, now: bool = False, failure: BaseException | None = None) -> None:
        """Renew the page, every few seconds at most; a failure comes first."""
        self._shown.show(markdown(self._profile, self._folder, failure), now=now)


def markdown(profile: Profile, folder: Path, failure: BaseException | None = None) -> str:
    """The page's text."""
    history = History.read(folder)
    parts = [] if failure is None else [failed(failure, profile, folder)]
    steps = profile.train.steps
    if history.steps:
        last = history.steps[-1]
        parts.append(f"## Step {last['step']:,} of {steps:,}, loss {last['loss']:.4f}")
        drawn = picture(history.losses(), x_label="step", y_label="loss")
        parts.append(f"![Loss by step, {last['loss']:.4f} at the last one]({drawn})" if drawn else "")
        usual, seconds = history.usual("tokens_per_second"), history.usual("step_seconds")
        if usual and seconds:
            left = duration(seconds * (steps - last["step"]))
            parts.append(f"{usual:,.0f} tokens a second, {seconds:.3g} s a step, {left} left")
    else:
        parts.append(f"## {profile.name}: {steps:,} steps to train")
    parts += [_plan(folder), _incidents(folder), _places(profile, folder)]
    return "\n\n".join(part for part in parts if part)


def failed(failure: BaseException, profile: Profile | None = None, folder: Path | None = None) -> str:
    """What happened, in the failure's own words, and what to do next."""
    text = str(failure) or type(failure).__name__
    parts = ["# Failed", f"**What happened:** {_plain(text)}"]
    detail = getattr(failure, "detail", "")
    if detail:
        parts.append("```\n" + "\n".join(str(detail).splitlines()[-12:]).replace("```", "'''") + "\n```")
    parts.append(f"**What to do next:** {_advice(failure, profile, folder)}")
    return "\n\n".join(parts)


def _advice(failure: BaseException, profile: Profile | None, folder: Path | None) -> str:
    if isinstance(failure, ProfileError):
        change = f", for instance to `{failure.choices[0]}`" if failure.choices else ""
        return f"change `{failure.key}`{change}, and start the run again. What is done already is not done twice."
    saved = runs.checkpoints(folder) if folder else {}
    on = (
        f"goes on from step {max(saved):,}, its newest checkpoint"
        if saved
        else "does only what is not done yet"
    )
    advice = (
        f"mend what the message names, then **Retry** this run here, or run the same command again: it {on}."
    )
    if folder:
        advice += f" The programs' own logs are in `{folder / 'logs'}`."
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
        "tokens": in_words(plan["tokens"]),
        "fullest rank": f"{in_bytes(fullest)} of {in_bytes(plan['device_bytes'])}",
    }
    if plan.get("step_seconds"):
        rows["time a step"] = f"{plan['step_seconds']:.3g} s"
        rows["tokens a second"] = f"{plan['tokens_per_second']:,.0f}"
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return f"## The plan\n\n| | |\n|---|---|\n{table}"


def _incidents(folder: Path) -> str:
    events = read_events(folder)[-EVENTS:]
    lines = [
        f"- step {event.get('step', '?')}: {event['event']}, {_plain(event.get('reason', ''))}"
        for event in events
    ]
    return "## Incidents\n\n" + "\n".join(lines) if lines else ""


def _places(profile: Profile, folder: Path) -> str:
    command = (
        f"trainshed tensorboard {shlex.quote(profile.name)} --store {shlex.quote(str(folder.parents[1]))}"
    )
    return (
        f"## Where it is\n\nThe run's folder: `{folder}`\n\n"
        f"TensorBoard: `{command}`, then [{TENSORBOARD}]({TENSORBOARD})"
    )


def _plain(text: str) -> str:
    """A text that Markdown leaves as it is, in one line."""
    return "".join(f"\\{mark}" if mark in "\\`*_{}[]<>#|!" else mark for mark in " ".join(text.split()))
