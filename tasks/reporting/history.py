"""A run's metrics.jsonl as curves by step, medians and totals, read incrementally in bounded memory."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from modeling.supervision.time_account import usual_step
from modeling.training.metrics import current_names
from profiles.files import run_files
from profiles.files.jsonl import LogFollower, is_metrics
from profiles.schema import Profile
from tasks.reporting.advice import lower_evaluation
from tasks.reporting.chart import LINE_STYLES, Points, Series
from tasks.reporting.downsampling import Curve, Sample
from tasks.reporting.format import INITIAL, validation_name

SMOOTHING = 10  # points on each side that a smoothed value averages
RECENT = 10  # steps that the time left is estimated from
OF_SOURCE = "validation_loss/"  # prefix of the metrics of data sources
CURVES = ("loss", "learning_rate", "gradient_norm", "tokens_per_second", "memory_bytes")
MEDIANS = (
    *("step_seconds", "tokens_per_second", "mfu"),
    *("data_wait_seconds", "forward_backward_seconds", "optimizer_seconds", "communication_seconds"),
)

MAXIMA = ("memory_bytes", "graph_cache_misses")


class History:
    """Contents of a run's metrics.jsonl; `update` reads the new rows.

    Attributes:
        steps: number of training steps.
        last: row of the last training step, None before the first.
        recent: rows of the last training steps.
        last_evaluation: row of the last evaluation during training.
        lowest_evaluation: row with the lowest loss of the evaluations of as many tokens as the last one.
    """

    last: dict[str, Any] | None
    last_evaluation: dict[str, Any] | None
    lowest_evaluation: Mapping[str, Any] | None

    def __init__(self, folder: Path) -> None:
        self._follower = LogFollower(folder / run_files.METRICS, on_restart=self._clear)
        self._clear()

    @classmethod
    def read(cls, folder: Path) -> Self:
        history = cls(folder)
        history.update()
        return history

    def update(self) -> None:
        """Read the rows that were added; all rows if training has resumed, since that drops some."""
        for row in map(current_names, self._follower.rows(is_metrics)):
            if "loss" in row:
                self._add_step(row)
            if "validation_loss" in row:
                self.last_evaluation = row
                self.lowest_evaluation = lower_evaluation(self.lowest_evaluation, row)
                self._add_to_curve("validation_loss", row)
                for key in row:
                    if key.startswith(OF_SOURCE):
                        self._add_to_curve(key, row)

    def _clear(self) -> None:
        self.steps, self._seconds, self._skipped = 0, 0.0, 0
        self.last = self.last_evaluation = self.lowest_evaluation = None
        self.recent: deque[dict[str, Any]] = deque(maxlen=RECENT)

        self._curves: defaultdict[str, Curve] = defaultdict(Curve)
        self._samples: defaultdict[str, Sample] = defaultdict(Sample)
        self._first: dict[str, float] = {}
        self._maxima: dict[str, float] = {}

    def _add_step(self, row: dict[str, Any]) -> None:
        self.steps += 1
        self.last = row
        self.recent.append(row)
        self._seconds += row.get("step_seconds", 0.0)
        self._skipped += bool(row.get("skipped"))
        for key in CURVES:
            self._add_to_curve(key, row)
        for key in MEDIANS:
            if isinstance(value := row.get(key), int | float):
                if key in self._first:
                    self._samples[key].add(value)
                else:
                    self._first[key] = value
        for key in MAXIMA:
            if isinstance(value := row.get(key), int | float):
                self._maxima[key] = max(value, self._maxima.get(key, value))

    def _add_to_curve(self, key: str, row: dict[str, Any]) -> None:
        if isinstance(value := row.get(key), int | float):
            self._curves[key].add(row["step"], value)

    def curve(self, key: str, scale: float = 1.0) -> Points:
        """Downsampled (step, value × scale) of the rows with the metric, one of CURVES or "validation_loss"."""
        return [(step, value * scale) for step, value in self._curves[key].points]

    def median(self, key: str) -> float | None:
        """Median of one of MEDIANS without its first value, which includes warm-up; None if not measured."""
        median = self._samples[key].median
        return self._first.get(key) if median is None else median

    def maximum(self, key: str) -> float | None:
        """Maximum of one of MAXIMA."""
        return self._maxima.get(key)

    def measurements(self, profile: Profile) -> dict[str, Any]:
        """Totals and medians of the run, as report.json holds them; None for a metric that was not measured."""
        return {
            "steps": self.steps,
            "loss": self.last["loss"] if self.last else None,
            "tokens": self.steps * profile.step_tokens,
            "training_seconds": self._seconds,
            "step_seconds": self.median("step_seconds"),
            "tokens_per_second": self.median("tokens_per_second"),
            "mfu": self.median("mfu"),
            "memory_bytes": self.maximum("memory_bytes"),
            "skipped": self._skipped,
            "graph_cache_misses": self.maximum("graph_cache_misses"),
        }

    def loss_series(self, profile: Profile) -> list[Series]:
        """Training loss, its moving average and validation loss, for a chart."""
        lines = [Series("training", "training", self.curve("loss"))]
        if smoothed := self.smoothed_loss():
            steps = (2 * SMOOTHING + 1) * self._curves["loss"].group_size
            lines.append(Series(f"training, mean of {steps:,} steps", "smooth", smoothed))
        evaluated = self.curve("validation_loss")
        initial, later = (
            [point for point in evaluated if (point[0] == 0) == first] for first in (True, False)
        )
        return [
            *lines,
            Series(validation_name(profile.evaluate.batches), "validation", later, dots=True),
            Series(INITIAL, "validation", initial, dots=True, joined=False),
        ]

    def source_series(self) -> list[Series]:
        """Validation loss of each data source during training, for a chart."""
        names = sorted(key for key in self._curves if key.startswith(OF_SOURCE))
        return [
            Series(
                name.removeprefix(OF_SOURCE), f"line-{number % LINE_STYLES + 1}", self.curve(name), dots=True
            )
            for number, name in enumerate(names)
        ]

    def smoothed_loss(self) -> Points:
        """Moving average of the training loss; empty for a run that is too short."""
        losses = self.curve("loss")
        return moving_average(losses) if len(losses) > 4 * SMOOTHING else []


def seconds_left(rows: Sequence[dict[str, Any]], steps: int) -> float | None:
    """Seconds to the last step at the pace of the latest rows; None after it or if the pace is unknown."""
    usual = usual_step(rows)
    left = steps - rows[-1]["step"]
    return None if usual is None or left <= 0 else left * usual["step_seconds"]


def moving_average(points: Points) -> list[tuple[float, float]]:
    """Centered moving average over SMOOTHING points on each side, fewer at the ends.

    Near the start, where a loss falls steeply, the window is shorter on both sides, so that the average is not below the curve.
    Near the end it is shorter on the right only, so that it does not follow the last, noisy points.
    """
    averages = []
    for index, (x, _) in enumerate(points):
        reach = min(SMOOTHING, index)
        window = points[index - reach : index + reach + 1]
        averages.append((x, sum(value for _, value in window) / len(window)))
    return averages
