"""How a training run shows itself while it runs: a line for people, a bar and a table of the last steps in Prefect.

Reads what training writes (`metrics.jsonl`, one JSON object a step); costs one log line a second and two API calls
every few seconds at most.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from pathlib import Path
from statistics import median
from typing import Any
from uuid import UUID

from tasks.tail import Tail
from tasks.text import duration

log = logging.getLogger(__name__)

LINE_SECONDS = 1.0
API_SECONDS = 5.0
TABLE_STEPS = 10


def tell(text: str, done: float | None = None) -> None:
    """What a step is doing now, and which share of it is done: a line that the next one replaces on a terminal."""
    log.info("%s", text if done is None else f"{text}  {done:.0%}", extra={"progress": True})


class Bar:
    """A progress bar among the artifacts of Prefect's UI. What Prefect cannot take now is left out: the work goes on."""

    def __init__(self, key: str, description: str) -> None:
        self._key, self._description = key, description
        self._bar: UUID | None = None
        self._sent_at = 0.0

    def show(self, done: float) -> None:
        """The share that is done, 0 to 1; sent every few seconds at most."""
        now = time.monotonic()
        if now - self._sent_at < API_SECONDS and done < 1:
            return
        self._sent_at = now
        from prefect.artifacts import create_progress_artifact, update_progress_artifact

        try:
            if self._bar is None:
                self._bar = create_progress_artifact(100 * done, key=self._key, description=self._description)
            else:
                update_progress_artifact(self._bar, 100 * done)
        except Exception as error:
            log.debug("Prefect did not take the progress: %s", error)


class Progress:
    """Follows one run's metrics; `watch` is to be called a few times a second."""

    def __init__(self, metrics: Path, steps: int) -> None:
        self._tail = Tail(metrics)
        self._steps = steps
        self._recent: deque[dict[str, Any]] = deque(maxlen=TABLE_STEPS)
        self._said_at = 0.0
        self._sent_at = 0.0
        self._board = Board()
        self._started = False

    def watch(self) -> None:
        for row in self._tail.rows():
            if "loss" in row:
                self._recent.append(row)
            elif self._started and "validation_loss" in row:
                log.info("step %d: validation loss %.4f", row["step"], row["validation_loss"])
        # What was there before this attempt is no news, apart from the last steps that the table shows.
        self._started = True
        now = time.monotonic()
        if not self._recent:
            return
        last = self._recent[-1]["step"] >= self._steps
        if now - self._said_at >= LINE_SECONDS:
            self._said_at = now
            log.info("%s", line(list(self._recent), self._steps), extra={"progress": True})
        if now - self._sent_at >= API_SECONDS or last:
            self._sent_at = now
            self._board.show(list(self._recent), self._steps)


def line(rows: list[dict[str, Any]], steps: int) -> str:
    """The newest step in words: step, loss, learning rate, gradient norm, tokens/s, MFU if known, time left."""
    row = rows[-1]
    parts = [
        f"step {row['step']:>{len(str(steps))}}/{steps}",
        f"loss {row['loss']:.4f}",
        f"learning rate {row['learning_rate']:.2e}",
        f"gradient norm {row['gradient_norm']:.2f}",
        f"{row['tokens_per_second']:,.0f} tokens/s",
    ]
    if row.get("mfu") is not None:
        parts.append(f"MFU {row['mfu']:.1%}")
    if row["step"] < steps and len(rows) > 1:  # the first step warms up and tells nothing
        left = (steps - row["step"]) * median(entry["step_seconds"] for entry in rows)
        parts.append(f"{duration(left)} left")
    return "  ".join(parts)


class Board:
    """The run's two artifacts in Prefect's UI. What Prefect cannot take now is left out: training goes on."""

    def __init__(self) -> None:
        self._bar: UUID | None = None
        self._table: UUID | None = None

    def show(self, rows: list[dict[str, Any]], steps: int) -> None:
        try:
            self._show(rows, min(100.0, 100.0 * rows[-1]["step"] / steps))
        except Exception as error:
            log.debug("Prefect did not take the progress: %s", error)

    def _show(self, rows: list[dict[str, Any]], percent: float) -> None:
        from prefect.artifacts import (
            create_progress_artifact,
            create_table_artifact,
            update_progress_artifact,
        )
        from prefect.client.orchestration import get_client
        from prefect.client.schemas.actions import ArtifactUpdate

        shown = ("step", "loss", "learning_rate", "gradient_norm", "tokens_per_second", "mfu", "step_seconds")
        cells = [{key: row.get(key) for key in shown} for row in reversed(rows)]
        if self._bar is None or self._table is None:
            self._bar = create_progress_artifact(
                percent, key="training", description="Steps of training done"
            )
            self._table = create_table_artifact(
                cells, key="last-steps", description="The last steps of training"
            )
            return
        update_progress_artifact(self._bar, percent)
        with get_client(sync_client=True) as client:
            client.update_artifact(self._table, ArtifactUpdate(data=json.dumps(cells)))
