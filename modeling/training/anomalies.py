"""Losses that must not reach the weights, and the samples that a run leaves out because of them.

A loss that is not finite, or above `spike_factor` times the median of the last WINDOW good ones, skips its step: the weights
stay as they were (PaLM, arXiv 2204.02311, section 5.1). After `bad_steps` of them in a row the run goes back to its last
checkpoint from before them, and on from there without their samples; after `rollbacks` of those it stops.

What is left out is a list of ranges of sample numbers. It is part of what a checkpoint saves, so that resuming is exact, on any
topology: the stream of samples is that of the seed with those ranges cut out of it.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import time
from collections import deque
from pathlib import Path
from typing import Any

from profiles.schema import Train

WINDOW = 50
KNOWN = 10  # good losses before one can be called a spike

Ranges = list[tuple[int, int]]


class Guard:
    """Judges each step's loss, the same on every rank.

    Args:
        state: what `state` gave when the checkpoint was saved that training goes on from, so that it judges alike.
    """

    def __init__(self, settings: Train, state: dict[str, Any] | None = None) -> None:
        self._factor, self._limit = settings.spike_factor, settings.bad_steps
        state = state or {"good": [], "in_a_row": 0}
        self._good: deque[float] = deque(state["good"], maxlen=WINDOW)
        self.in_a_row: int = state["in_a_row"]

    def state(self) -> dict[str, Any]:
        """As JSON: the last good losses, and how many bad ones came after them."""
        return {"good": list(self._good), "in_a_row": self.in_a_row}

    def judge(self, loss: float) -> str:
        """Why the step is to be skipped; empty where it is not."""
        if not math.isfinite(loss):
            return f"loss is {loss}"
        if self._factor is not None and len(self._good) >= KNOWN:
            usual = statistics.median(self._good)
            if loss > self._factor * usual:
                return f"loss {loss:.4f} is {loss / usual:.1f} times the median {usual:.4f}"
        return ""

    def note(self, loss: float, skipped: bool) -> None:
        """What became of the step."""
        if skipped:
            self.in_a_row += 1
        else:
            self.in_a_row = 0
            self._good.append(loss)

    @property
    def exhausted(self) -> bool:
        """Whether so many steps in a row were skipped that going on is of no use."""
        return self.in_a_row >= self._limit


def sample(position: int, left_out: Ranges) -> int:
    """The number of the sample at a position of the stream from which these ranges are cut, as [first, end)."""
    for first, end in sorted(left_out):
        if position >= first:
            position += end - first
    return position


def record(run: Path, event: str, *, reason: str, **facts: Any) -> None:
    """One line in the run's events.jsonl, which its report reads; `facts` may have a `time` of their own.

    A disk that takes no more costs the line, which the log has too, and not the run.
    """
    row = {"event": event, "time": round(time.time(), 3), "reason": reason, **facts}
    with contextlib.suppress(OSError), (run / "events.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
