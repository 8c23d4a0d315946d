"""What a run's metrics say: curves by step, and the usual value of each figure.

usual value    median over the steps but for the first of each start, which warms up
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tasks.reporting.chart import Series
from tasks.store.runs import read_metrics

SMOOTHING = 10  # steps before and after each that the drawn mean takes in
Points = list[tuple[float, float]]


@dataclass(frozen=True)
class History:
    """Rows of metrics.jsonl: those of steps, and those of evaluations on the way."""

    steps: Sequence[dict[str, Any]]
    evaluations: Sequence[dict[str, Any]]

    @classmethod
    def of(cls, rows: Sequence[dict[str, Any]]) -> History:
        return cls([row for row in rows if "loss" in row], [row for row in rows if "validation_loss" in row])

    @classmethod
    def read(cls, folder: Path) -> History:
        """Of a run's folder."""
        return cls.of(read_metrics(folder))

    def curve(self, key: str, scale: float = 1.0) -> Points:
        """(step, value · scale) wherever the figure was measured."""
        rows = self.evaluations if key == "validation_loss" else self.steps
        return [(row["step"], row[key] * scale) for row in rows if isinstance(row.get(key), int | float)]

    def usual(self, key: str) -> float | None:
        """The figure's median; None where it was not measured."""
        values = [value for _, value in self.curve(key)[1:] or self.curve(key)]
        return median(values) if values else None

    def highest(self, key: str) -> float | None:
        return max((value for _, value in self.curve(key)), default=None)

    @property
    def skipped(self) -> int:
        """Steps whose update was left out."""
        return sum(bool(row.get("skipped")) for row in self.steps)

    def losses(self) -> list[Series]:
        """The loss curves, to be drawn."""
        losses = self.curve("loss")
        smooth = Series(f"training, mean of {2 * SMOOTHING + 1} steps", "smooth", smoothed(losses))
        lines = [Series("training", "training", losses)]
        if len(losses) > 2 * SMOOTHING:
            lines.append(smooth)
        return [*lines, Series("validation", "validation", self.curve("validation_loss"), dots=True)]


def smoothed(points: Sequence[tuple[float, float]]) -> Points:
    """Means over as many steps before as after each, so that the curve neither lags nor bends at its ends."""
    finite = [point for point in points if math.isfinite(point[1])]
    means = []
    for index, (step, _) in enumerate(finite):
        reach = min(SMOOTHING, index, len(finite) - 1 - index)
        around = finite[index - reach : index + reach + 1]
        means.append((step, sum(loss for _, loss in around) / len(around)))
    return means
