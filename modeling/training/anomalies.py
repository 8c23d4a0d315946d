"""Loss anomalies: skip a step with a bad loss, and exclude the samples of steps that were rolled back.

A loss that is not finite, or above `spike_factor` times the median of the last WINDOW good ones, skips the optimizer update
(PaLM, arXiv 2204.02311, section 5.1). After `bad_steps` skipped steps in a row the run rolls back to its latest checkpoint from
before them and continues without their samples; after `rollbacks` rollbacks it stops.

Excluded samples are ranges of sample numbers, stored in checkpoints, so resume is exact on any topology: the sample stream is
that of the seed with those ranges removed.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Any

from profiles.schema import Train

WINDOW = 50
MINIMUM_LOSSES = 10  # good losses needed before one can be called a spike

Ranges = list[tuple[int, int]]


class AnomalyGuard:
    """Decides on each step's loss, identically on every rank.

    Args:
        state: `state()` at the checkpoint that training resumes from, so that decisions are the same.
    """

    def __init__(self, settings: Train, state: dict[str, Any] | None = None) -> None:
        self._factor, self._limit = settings.spike_factor, settings.bad_steps
        state = state or {"good": [], "in_a_row": 0}
        self._good_losses: deque[float] = deque(state["good"], maxlen=WINDOW)
        self.skipped_in_a_row: int = state["in_a_row"]

    def state(self) -> dict[str, Any]:
        """JSON state for the checkpoint: the last good losses and the number of skipped steps since."""
        return {"good": list(self._good_losses), "in_a_row": self.skipped_in_a_row}

    def anomaly(self, loss: float) -> str:
        """Why the step must be skipped; empty if the loss is normal."""
        if not math.isfinite(loss):
            return f"loss is {loss}"
        if self._factor is not None and len(self._good_losses) >= MINIMUM_LOSSES:
            median = statistics.median(self._good_losses)
            if loss > self._factor * median:
                return f"loss {loss:.4f} is {loss / median:.1f} times the median {median:.4f}"
        return ""

    def update(self, loss: float, skipped: bool) -> None:
        """Record the outcome of a step."""
        if skipped:
            self.skipped_in_a_row += 1
        else:
            self.skipped_in_a_row = 0
            self._good_losses.append(loss)

    @property
    def exhausted(self) -> bool:
        """Whether `bad_steps` steps in a row were skipped."""
        return self.skipped_in_a_row >= self._limit


def sample_number(position: int, excluded: Ranges) -> int:
    """Sample at a position of the stream from which ranges [start, end) are removed."""
    for start, end in sorted(excluded):
        if position >= start:
            position += end - start
    return position
