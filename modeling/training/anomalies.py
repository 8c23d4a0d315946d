"""Loss anomalies: which steps are skipped, and when a run rolls back, as train.py then does.

A loss or gradient norm that is not finite, or a loss above `spike_factor` times the median of the last WINDOW good ones, skips
the optimizer update (PaLM, arXiv 2204.02311, section 5.1). After `bad_steps` skipped steps in a row the run rolls back to its
latest checkpoint from before them and continues without their samples; after `rollbacks` rollbacks it stops.

Excluded samples are ranges of sample numbers, stored in checkpoints, so resume is exact on any topology: the sample stream is
that of the seed with those ranges removed.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from profiles.schema import Train

WINDOW = 50
MIN_LOSSES = 10  # good losses needed before one can be called a spike

Ranges = list[tuple[int, int]]
Decide = Callable[..., Tensor]
Record = Callable[..., None]
Functions = tuple[Decide, Record]


class AnomalyGuard:
    """Decides on each step's loss, identically on every rank.

    The device decides before the update, without the host: `_window` holds the last good losses in any order, padded with
    infinity. The host reads the outcome later and keeps the same losses in order, for checkpoints and messages.

    Args:
        state: `state()` at the checkpoint that training resumes from, so that decisions are the same.
        functions: compiled `decide` and `record`.
    """

    def __init__(
        self,
        settings: Train,
        device: torch.device,
        state: dict[str, Any] | None = None,
        functions: Functions | None = None,
    ) -> None:
        self._decide: Decide
        self._record: Record
        self._decide, self._record = functions or (decide, record)
        self._factor, self._limit = settings.spike_factor, settings.bad_steps
        state = state or {"good": [], "in_a_row": 0}
        self._good_losses: deque[float] = deque(state["good"], maxlen=WINDOW)
        self.skipped_in_a_row: int = state["in_a_row"]
        padding = [math.inf] * (WINDOW - len(self._good_losses))
        self._window = torch.tensor([*self._good_losses, *padding], dtype=torch.float32, device=device)
        self._count = torch.full((), float(len(self._good_losses)), device=device)  # of good losses so far
        self._slots = torch.arange(WINDOW, device=device)

    def state(self) -> dict[str, Any]:
        """JSON state for the checkpoint: the last good losses and the number of skipped steps since."""
        return {"good": list(self._good_losses), "in_a_row": self.skipped_in_a_row}

    @torch.no_grad()
    def decide(self, loss: Tensor) -> Tensor:
        """Whether the step with this loss must be skipped; 0-dim on the device."""
        return self._decide(loss, self._window, self._count, self._factor)

    @torch.no_grad()
    def record(self, loss: Tensor, skipped: Tensor) -> None:
        """Add a step's loss to the window unless it was skipped; both on the device."""
        if self._factor is not None:
            self._record(loss, skipped, self._window, self._count, self._slots)

    def reason(self, loss: float, gradient_norm: float) -> str:
        """Why a step was skipped; call it before `update`."""
        if not math.isfinite(loss):
            return f"loss is {loss}"
        if not math.isfinite(gradient_norm):
            return f"gradient norm is {gradient_norm}"
        if not self._good_losses:  # values that no step could have had
            return f"loss {loss:.4f} or gradient norm {gradient_norm:.4f} is implausible"
        median = statistics.median(self._good_losses)
        ratio = f"{loss / median:.1f} times" if median > 0 else "above"
        return f"loss {loss:.4f} is {ratio} the median {median:.4f}"

    def update(self, loss: float, skipped: bool) -> None:
        """Record the outcome of a step on the host."""
        if skipped:
            self.skipped_in_a_row += 1
        else:
            self.skipped_in_a_row = 0
            self._good_losses.append(loss)

    @property
    def nearly_exhausted(self) -> bool:
        """Whether one more skipped step exhausts the guard."""
        return self.skipped_in_a_row + 1 >= self._limit

    @property
    def exhausted(self) -> bool:
        """Whether `bad_steps` steps in a row were skipped."""
        return self.skipped_in_a_row >= self._limit


def decide(loss: Tensor, window: Tensor, count: Tensor, factor: float | None) -> Tensor:
    """Whether a loss is not finite, or a spike above the window of good losses, `count` of them so far."""
    bad = loss.isfinite().logical_not()
    if factor is None:
        return bad
    median = _median(window, count.clamp(max=WINDOW))
    # A user's loss may be negative, and most hinge losses of a run may be 0, of which no loss is a multiple.
    spike = (loss - median > (factor - 1) * median.abs()) & (median != 0)
    return bad | (spike & (count >= MIN_LOSSES))


def record(loss: Tensor, skipped: Tensor, window: Tensor, count: Tensor, slots: Tensor) -> None:
    """Write a loss into the window (50), with numbered `slots`, and count it, in place, unless skipped."""
    replaced = (slots == count % WINDOW) & (skipped == 0)
    window.copy_(loss.where(replaced, window))
    count.add_(1 - skipped)


def _median(values: Tensor, count: Tensor) -> Tensor:
    """Median of the `count` smallest values (n) by n² comparisons; not every device can sort."""
    smaller = (values[None] < values[:, None]).float().sum(1)  # (n)
    equal = (values[None] == values[:, None]).float().sum(1)  # (n)

    def order_statistic(k: Tensor) -> Tensor:
        return values.where((smaller <= k) & (k < smaller + equal), -math.inf).amax()

    return (order_statistic(((count - 1) / 2).floor()) + order_statistic((count / 2).floor())) / 2
