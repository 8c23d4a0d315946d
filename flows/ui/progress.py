"""How a training run shows itself while it runs: a line for people; in Prefect a bar, a table of the last steps, the page.

Reads what training writes (`metrics.jsonl`, one JSON object a step); costs one log line a second and three API
calls every few seconds at most.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from flows.ui.artifacts import Bar, Shown, cells
from flows.ui.console import BETWEEN
from flows.ui.overview import Overview
from profiles.schema import Profile
from tasks import graphs
from tasks.launchers.log_follower import LogFollower
from tasks.reporting.format import format_bytes, format_duration, format_value

log = logging.getLogger(__name__)

LINE_SECONDS = 1.0
TABLE_STEPS = 10


def tell(text: str, done: float | None = None) -> None:
    """What a step is doing now, and which share of it is done: a line that the next one replaces on a terminal."""
    log.info("%s", text if done is None else f"{text}  {done:.0%}", extra={"progress": True})


def watched(bar: Bar) -> Callable[[str, float], None]:
    """What a step calls with what it does and the share that is done: shown here and by a bar."""

    def progress(text: str, done: float) -> None:
        tell(text, done)
        bar.show(done)

    return progress


class Progress:
    """Follows one run's metrics; `watch` is to be called a few times a second."""

    def __init__(self, profile: Profile, folder: Path) -> None:
        self._tail = LogFollower(folder / "metrics.jsonl")
        self._steps = profile.train.steps
        self._metrics = [name.partition(":")[2] for name in profile.evaluate.metrics]
        self._recent: deque[dict[str, Any]] = deque(maxlen=TABLE_STEPS)
        self._said_at = 0.0
        self._bar = Bar("training", "Steps of training done")
        self._table = Shown("table", "last-steps", "The last steps of training")
        self._overview = Overview(profile, folder)
        self._started = False

    def watch(self) -> None:
        new = False
        for row in self._tail.rows():
            new = True
            if "loss" in row:
                self._recent.append(row)
            elif self._started and "validation_loss" in row:
                own = "".join(f", {name} {format_value(row[name])}" for name in self._metrics if name in row)
                log.info("step %d: validation loss %.4f%s", row["step"], row["validation_loss"], own)
        # What was there before this attempt is no news, apart from the last steps that the table shows.
        self._started = True
        if not self._recent or not new:
            return
        now = time.monotonic()
        if now - self._said_at >= LINE_SECONDS:
            self._said_at = now
            log.info("%s", line(list(self._recent), self._steps), extra={"progress": True})
        step = self._recent[-1]["step"]
        self._bar.show(step / self._steps)
        self._table.show(lambda: cells(map(shown, reversed(self._recent))), now=step >= self._steps)
        self._overview.show(now=step >= self._steps)


def shown(row: dict[str, Any]) -> dict[str, str | None]:
    """A step as the table has it."""
    return {
        "step": f"{row['step']:,}",
        "loss": f"{row['loss']:.4f}",
        "learning rate": f"{row['learning_rate']:.2e}",
        "gradient norm": f"{row['gradient_norm']:.3f}",
        "tokens a second": f"{row['tokens_per_second']:,.0f}",
        "MFU": None if row.get("mfu") is None else f"{row['mfu']:.1%}",
        "seconds": f"{row['step_seconds']:.3f}",
    }


def line(rows: list[dict[str, Any]], steps: int) -> str:
    """The newest step in words, what matters most first, as narrow terminals leave out the end: step, loss, tokens/s, time
    left, MFU if known, learning rate, gradient norm.
    """
    row = rows[-1]
    parts = [
        f"step {row['step']:>{len(str(steps))}}/{steps}",
        f"loss {row['loss']:.4f}",
        f"{row['tokens_per_second']:,.0f} tokens/s",
    ]
    if row["step"] < steps and len(rows) > 1:  # the first step warms up and tells nothing
        left = (steps - row["step"]) * median(entry["step_seconds"] for entry in rows)
        parts.append(f"{format_duration(left)} left")
    if row.get("mfu") is not None:
        parts.append(f"MFU {row['mfu']:.1%}")
    parts += [f"lr {row['learning_rate']:.2e}", f"grad norm {row['gradient_norm']:.2f}"]
    return BETWEEN.join(parts)


def show_graphs(record: Path) -> None:
    """What became of each graph, as a table in Prefect's UI; none where it did not come so far."""
    if not record.exists():
        return
    summary = json.loads(record.read_text())
    rows = [
        {
            "program": entry["name"],
            "graphs": entry["graphs"],
            "status": entry["status"],
            "time": None if entry["seconds"] is None else format_duration(entry["seconds"]),
            "memory": None if entry["peak_bytes"] is None else format_bytes(entry["peak_bytes"]),
            "error": entry["error"],
        }
        for entry in summary["programs"]
    ]
    Shown("table", "graphs", graphs.sentence(summary)).show(lambda: cells(rows), now=True)
