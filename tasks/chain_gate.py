"""Gate of a chain: decides from a finished run's evaluation whether the next run starts."""

from __future__ import annotations

import logging
import operator
import re
from collections.abc import Mapping
from typing import Any

from profiles.rules.objectives import RISE
from profiles.schema import Evaluate

log = logging.getLogger(__name__)

OPERATORS = {"<=": operator.le, ">=": operator.ge}
CONDITION = re.compile(r"(\w+) *(<=|>=) *(.+)")


class GateMissed(Exception):
    """A run of a chain ended with a worse evaluation than its gate requires."""


def check_gate(
    run: str, settings: Evaluate, evaluation: Mapping[str, Any], before: Mapping[str, Any] | None
) -> None:
    """Check a run's evaluation against `evaluate.gate`, and log each value with its bound.

    Args:
        evaluation: `validation_loss`, `perplexity` and `metrics`.
        before: the evaluation of the initial weights; None if there is none, and no condition on it.

    Raises:
        GateMissed: names every condition that does not hold.
    """
    values = {name: evaluation[name] for name in ("validation_loss", "perplexity")} | evaluation["metrics"]
    if before is not None:
        values[RISE] = evaluation["validation_loss"] - before["validation_loss"]
    met: list[str] = []
    missed: list[str] = []
    for condition in settings.gate:
        parts = CONDITION.fullmatch(condition)
        assert parts is not None  # the profile's schema has the same pattern
        name, symbol, bound = parts.groups()
        holds = OPERATORS[symbol](values[name], float(bound))
        (met if holds else missed).append(f"{name} {values[name]:.4g} (required: {symbol} {bound})")
    if not settings.gate and before is not None:
        loss, start = values["validation_loss"], before["validation_loss"]
        if loss <= start:
            met.append(f"validation loss {loss:.4f} (before training: {start:.4f})")
        else:
            missed.append(f"validation loss rose from {start:.4f} to {loss:.4f}")
    if missed:
        raise GateMissed(f"run {run} missed its gate: {'; '.join(missed)}; the chain stops here")
    if met:
        log.info("run %s met its gate: %s", run, "; ".join(met))
