"""A flow run's overview in Prefect's UI: failure and next action, loss curve, plan, incidents, paths.

Rendered only from the run folder, so that any step can update it. The loss curve is an inline SVG of a few kB.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

from flows.ui.artifacts import PrefectArtifact
from modeling.planning.planner import Plan
from profiles.errors import ProfileError, counted
from profiles.files import run_files, state_files
from profiles.schema import Profile
from tasks.failures import FatalError
from tasks.reporting.advice import rise_warning
from tasks.reporting.chart import svg_data_uri
from tasks.reporting.format import (
    format_bytes,
    format_count,
    format_duration,
    format_mesh,
    format_step_time,
    format_time,
)
from tasks.reporting.history import History, seconds_left
from tasks.store.runs import read_events

KEY = "run"
MAX_EVENTS = 5  # the latest
MAX_DETAIL_LINES = 12  # of a failed job's output
TENSORBOARD = "http://127.0.0.1:6006"
ADDRESS = re.compile(r"(https?://[^\s|<>`]+)")
SPECIAL = re.compile(r"[\\`*_{}\[\]<>#|!]")


class Overview:
    """The overview artifact of one flow run."""

    def __init__(self, profile: Profile, folder: Path, flow_run: UUID | None = None) -> None:
        self._profile, self._folder, self._history = profile, folder, History(folder)
        description = f"{profile.name}: progress, plan, incidents and paths"
        self._artifact = PrefectArtifact("markdown", KEY, description, flow_run)

    def begin(self, plan: Plan, warnings: Sequence[str]) -> None:
        """Save the plan and the warnings in the run folder and show the page for the first time."""
        contents = {**plan.to_json(), "warnings": list(warnings)}
        state_files.write(self._folder / run_files.PLAN, json.dumps(contents, indent=1))
        self.update(now=True)

    def update(self, *, now: bool = False) -> None:
        """Render the page again; without `now`, at most every few seconds."""
        self._artifact.update(self._render, now=now)

    def end(self, notice: str) -> None:
        """Show how the run ended (Markdown) above the overview; raises if the run folder cannot be rendered."""
        rest = self._render(ended=True)
        self._artifact.update(lambda: f"{notice}\n\n{rest}", now=True)

    def _render(self, *, ended: bool = False) -> str:
        """The page without a notice; reads new metrics only, and omits the time left if the run has ended."""
        self._history.update()
        profile, folder = self._profile, self._folder
        plan = state_files.read_json(folder / run_files.PLAN)
        parts = (
            _training(profile, self._history, ended=ended),
            _warnings(plan, self._history),
            _plan(plan),
            _incidents(folder),
            _paths(profile, folder),
        )
        return "\n\n".join(part for part in parts if part)


def stop_markdown(message: str) -> str:
    """What a stopped run has saved, and how to resume it."""
    action = "**Retry** this run here or run the same command again to resume it."
    return f"# Stopped, {message}\n\n**What to do next:** {action}"


def failure_markdown(
    state: str, failure: BaseException, logs: Path | None = None, checkpoints: Sequence[int] = ()
) -> str:
    """The failure's message and what to do next, as Markdown.

    Args:
        state: name of the flow run's final state.
        checkpoints: steps of the complete checkpoints.
    """
    parts = [f"# {state}", f"**What happened:** {escape(str(failure) or type(failure).__name__)}"]
    if detail := str(getattr(failure, "detail", "")):
        last_lines = "\n".join(detail.splitlines()[-MAX_DETAIL_LINES:]).replace("```", "'''")
        parts.append(f"```\n{last_lines}\n```")
    parts.append(f"**What to do next:** {_next_action(failure, logs, checkpoints)}")
    return "\n\n".join(parts)


def _next_action(failure: BaseException, logs: Path | None, checkpoints: Sequence[int]) -> str:
    if isinstance(failure, ProfileError):
        change = f", for instance to `{failure.choices[0]}`" if failure.choices else ""
        return f"change `{failure.key}`{change}, and start the run again. Completed steps are not repeated."
    if isinstance(failure, FatalError):
        action = "change what the message names, and start the run again. The same run would fail again."
    else:
        latest = f"resumes from step {max(checkpoints):,}, its latest checkpoint" if checkpoints else ""
        resumes = latest or "skips the completed steps"
        action = f"fix what the message names, then **Retry** this run here or run the same command again: it {resumes}."
    return f"{action} The job logs are in `{logs}`." if logs else action


def _training(profile: Profile, history: History, *, ended: bool) -> str:
    """Step and loss as a heading, the loss curve, speed and time left."""
    steps = profile.train.last_step
    last = history.last
    if last is None:
        return f"## {profile.name}: {counted(steps, 'step')} to train"
    done = last["step"] >= steps
    step = f"All {steps:,} steps are done" if done and steps > 1 else f"Step {last['step']:,} of {steps:,}"
    parts = [f"## {step}, loss {last['loss']:.4f}"]
    if curve := svg_data_uri(history.loss_series(profile), x_label="step", y_label="loss"):
        parts.append(f"![Loss by step, now {last['loss']:.4f}]({curve})")
    speed, step_seconds = history.median("tokens_per_second"), history.median("step_seconds")
    if speed and step_seconds:
        seconds = None if ended else seconds_left(history.recent, steps)
        left = ""
        # With the time of the estimate, since the page of a flow that was killed stays as it is.
        if seconds is not None:
            left = f", {format_duration(seconds)} left as of {format_time(datetime.now(UTC).isoformat())}"
        parts.append(f"{speed:,.0f} tokens/s, {format_step_time(step_seconds)} per step{left}")
    return "\n\n".join(parts)


def _warnings(plan: Mapping[str, Any] | None, history: History) -> str:
    rise = rise_warning(history.lowest_evaluation, history.last_evaluation)
    warnings = [*(plan or {}).get("warnings", ()), *([rise] if rise else [])]
    return "## Warnings\n\n" + "\n".join(f"- {escape(text)}" for text in warnings) if warnings else ""


def _plan(plan: Mapping[str, Any] | None) -> str:
    if plan is None:
        return ""
    rows = {
        "parameters": f"{plan['parameters']:,}",
        "mesh": format_mesh(plan["mesh"]),
        "tokens": format_count(plan["tokens"]) if plan["tokens"] else "set by the data",
        "fullest rank": f"{format_bytes(plan['needs_bytes'])} of {format_bytes(plan['device_bytes'])}",
    }
    if plan.get("step_seconds"):
        rows["step time"] = format_step_time(plan["step_seconds"])
        rows["tokens/s"] = f"{plan['tokens_per_second']:,.0f}"
    return f"## Plan\n\n{markdown_table(('', 'planned'), [*rows.items()])}"


def _incidents(folder: Path) -> str:
    lines = []
    for event in read_events(folder)[-MAX_EVENTS:]:
        step = f"step {event['step']:,}: " if "step" in event else ""
        lines.append(f"- {step}{event['event']}: {escape(event.get('reason', ''))}")
    return "## Incidents\n\n" + "\n".join(lines) if lines else ""


def _paths(profile: Profile, folder: Path) -> str:
    store = folder.parents[1]
    command = f"trainshed tensorboard {shlex.quote(profile.name)} --store {shlex.quote(str(store))}"
    lines = [f"- run folder: `{folder}`"]
    outputs = {"report": folder / run_files.REPORT, "model": folder / run_files.EXPORT}
    lines += [f"- {name}: `{path}`" for name, path in outputs.items() if state_files.exists(path)]
    lines.append(f"- TensorBoard: `{command}`, then [{TENSORBOARD}]({TENSORBOARD})")
    return "## Paths\n\n" + "\n".join(lines)


def markdown_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of plain texts as Markdown; "" without rows."""
    lines = [titles, ["---"] * len(titles), *([*map(escape, row)] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) if rows else ""


def escape(text: str) -> str:
    """The text in one line, with Markdown's special characters escaped, but for those of addresses."""
    parts = ADDRESS.split(" ".join(text.split()))
    return "".join(part if index % 2 else SPECIAL.sub(r"\\\g<0>", part) for index, part in enumerate(parts))
