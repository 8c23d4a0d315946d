"""Progress of a running step: a line in the log, and a bar, a table and the overview in Prefect's UI.

Training is followed through `metrics.jsonl`. Costs at most three API calls every few seconds, and one log line per second, of
which Prefect's log gets a few per minute (`console.ProgressFilter`).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flows.ui.artifacts import PrefectArtifact, progress_bar, table_data
from flows.ui.console import log_progress
from flows.ui.overview import Overview
from profiles.files import run_files
from profiles.files.jsonl import LogFollower, is_metrics
from profiles.schema import Profile
from tasks.reporting.advice import lower_evaluation, rise_warning
from tasks.reporting.format import format_duration, format_value, validation_name
from tasks.reporting.history import RECENT, seconds_left

log = logging.getLogger(__name__)

LINE_SECONDS = 1.0  # between progress lines


class ProgressReporter:
    """A callback that logs what a step is doing and shows the completed fraction in a progress bar.

    No fraction is shown while it is 0, because 0% for minutes looks hung.
    """

    def __init__(self, key: str, description: str) -> None:
        self._bar, self._fraction = progress_bar(key, description), 0.0

    def __call__(self, text: str, fraction: float | None) -> None:
        if not fraction:
            log_progress(log, text)
        else:
            log_progress(log, text, f"{fraction:.0%}")
            self._show(fraction)

    def finish(self) -> None:
        """Complete the bar of a step that is done, whose last fraction is that before its last part."""
        if 0 < self._fraction < 1:
            self._show(1.0)

    def _show(self, fraction: float) -> None:
        self._fraction = fraction
        self._bar(fraction)


class TrainingProgress:
    """Shows a training run from its metrics; call `update` a few times a second."""

    def __init__(self, profile: Profile, folder: Path) -> None:
        self._metrics = LogFollower(folder / run_files.METRICS, on_restart=self._restart)
        self._steps = profile.train.last_step
        self._validation = validation_name(profile.evaluate.batches)
        self._lowest: Mapping[str, Any] | None = None  # evaluation
        self._warned: Mapping[str, Any] | None = None  # lowest evaluation above which a warning was logged
        self._user_metrics = [name.partition(":")[2] for name in profile.evaluate.metrics]
        self._recent: deque[dict[str, Any]] = deque(maxlen=RECENT)
        self._logged_at = 0.0
        self._bar = progress_bar("training", f"{profile.name}: training steps done")
        self._table = PrefectArtifact("table", "last-steps", f"{profile.name}: the latest training steps")
        self._overview = Overview(profile, folder)
        self._evaluated = 0  # last step whose evaluation was logged or found
        self._following = False  # whether rows are new, not those of an earlier process

    def update(self) -> None:
        """Show the rows that training wrote since the last call, except those of an earlier process."""
        rows = list(self._metrics.rows(is_metrics))
        following, self._following = self._following, True
        for row in rows:
            if "validation_loss" in row and row["step"] > self._evaluated:
                self._evaluated = row["step"]
                self._lowest = lower_evaluation(self._lowest, row)
                if following:
                    self._log_evaluation(row)
        if not following:
            return
        trained = [row for row in rows if "loss" in row]
        if not trained:
            return
        self._recent.extend(trained)
        now = time.monotonic()
        if now - self._logged_at >= LINE_SECONDS:
            self._logged_at = now
            log_progress(log, *step_parts(self._recent, self._steps))
        step = self._recent[-1]["step"]
        done = step >= self._steps
        self._bar(step / self._steps)
        self._table.update(lambda: table_data(map(table_row, reversed(self._recent))), now=done)
        self._overview.update(now=done)

    def _restart(self) -> None:
        """Start over: training has resumed and dropped rows, so all rows are read again."""
        self._recent.clear()
        self._following = False

    def _log_evaluation(self, row: dict[str, Any]) -> None:
        metrics = "".join(f", {name} {format_value(row[name])}" for name in self._user_metrics if name in row)
        log.info("step %d: %s %.4f%s", row["step"], self._validation, row["validation_loss"], metrics)
        warning = rise_warning(self._lowest, row)
        if warning and self._warned is not self._lowest:
            self._warned = self._lowest
            log.warning("warning: %s", warning)


def table_row(row: dict[str, Any]) -> dict[str, str | None]:
    """A step's metrics as a row of the table."""
    return {
        "step": f"{row['step']:,}",
        "loss": f"{row['loss']:.4f}",
        "learning rate": f"{row['learning_rate']:.2e}",
        "gradient norm": f"{row['gradient_norm']:.3f}",
        "tokens/s": f"{row['tokens_per_second']:,.0f}",
        "MFU": None if row.get("mfu") is None else f"{row['mfu']:.1%}",
        "seconds": f"{row['step_seconds']:.3f}",
    }


def step_parts(rows: Sequence[dict[str, Any]], steps: int) -> list[str]:
    """The latest step as parts of a progress line, the most important first."""
    row = rows[-1]
    parts = [
        f"step {row['step']:>{len(str(steps))}}/{steps}",
        f"loss {row['loss']:.4f}",
        f"{row['tokens_per_second']:,.0f} tokens/s",
    ]
    if (left := seconds_left(rows, steps)) is not None:
        parts.append(f"{format_duration(left)} left")
    if row.get("mfu") is not None:
        parts.append(f"MFU {row['mfu']:.1%}")
    return [*parts, f"lr {row['learning_rate']:.2e}", f"grad norm {row['gradient_norm']:.2f}"]
