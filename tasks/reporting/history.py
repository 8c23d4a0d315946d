"""A run's metrics.jsonl as curves by step, medians and totals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from profiles.schema import Profile
from tasks.reporting.chart import Points, Series
from tasks.store.runs import read_metrics

REPORT_JSON = "report.json"
SMOOTHING = 10  # steps before and after each that a smoothed value averages


@dataclass(frozen=True)
class History:
    """Rows of metrics.jsonl: of training steps, and of evaluations during training."""

    steps: Sequence[dict[str, Any]]
    evaluations: Sequence[dict[str, Any]]

    @classmethod
    def read(cls, folder: Path) -> History:
        """Read the history of the run in this folder."""
        rows = read_metrics(folder)
        return cls([row for row in rows if "loss" in row], [row for row in rows if "validation_loss" in row])

    def curve(self, key: str, scale: float = 1.0) -> Points:
        """(step, value × scale) of every row that has the metric."""
        rows = self.evaluations if key == "validation_loss" else self.steps
        return [(row["step"], row[key] * scale) for row in rows if isinstance(row.get(key), int | float)]

    def median(self, key: str) -> float | None:
        """Median of a metric without its first value, which includes warm-up; None if it was not measured."""
        values = [value for _, value in self.curve(key)[1:] or self.curve(key)]
        return median(values) if values else None

    def maximum(self, key: str) -> float | None:
        return max((value for _, value in self.curve(key)), default=None)

    def measurements(self, profile: Profile) -> dict[str, Any]:
        """Totals and medians of the run, as report.json holds them; None for a metric that was not measured."""
        return {
            "steps": len(self.steps),
            "loss": self.steps[-1]["loss"] if self.steps else None,
            "tokens": len(self.steps) * profile.train.global_batch_size * profile.train.sequence_length,
            "training_seconds": sum(row.get("step_seconds", 0.0) for row in self.steps),
            "step_seconds": self.median("step_seconds"),
            "tokens_per_second": self.median("tokens_per_second"),
            "mfu": self.median("mfu"),
            "memory_bytes": self.maximum("memory_bytes"),
            "skipped": sum(bool(row.get("skipped")) for row in self.steps),
            "cold_compiles": self.maximum("cold_compiles"),
        }

    def loss_series(self) -> list[Series]:
        """Training loss, its moving average and validation loss, for a chart."""
        losses = self.curve("loss")
        lines = [Series("training", "training", losses)]
        if len(losses) > 2 * SMOOTHING:
            label = f"training, mean of {2 * SMOOTHING + 1} steps"
            lines.append(Series(label, "smooth", moving_average(losses)))
        return [*lines, Series("validation", "validation", self.curve("validation_loss"), dots=True)]


def moving_average(points: Points) -> list[tuple[float, float]]:
    """Centered moving average of the finite points; the window shrinks towards both ends, so the curve does not lag."""
    finite = [point for point in points if math.isfinite(point[1])]
    means = []
    for index, (step, _) in enumerate(finite):
        reach = min(SMOOTHING, index, len(finite) - 1 - index)
        window = finite[index - reach : index + reach + 1]
        means.append((step, sum(value for _, value in window) / len(window)))
    return means
