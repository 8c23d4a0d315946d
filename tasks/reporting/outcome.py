"""Outcome of one step of a flow, as the console, the run's page and the report show it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """How a step of a flow ended.

    Attributes:
        how: "done", "cached", "skipped" or "failed".
        seconds: duration; of a cached step, the time its artifact took when it was made; None if unknown.
        note: one line for the reader, for example why a step was skipped.
        summary: summary of the step's artifact.
        retries: failed attempts before this one.
    """

    step: str
    how: str
    seconds: float | None
    note: str = ""
    summary: Mapping[str, Any] = field(default_factory=dict)
    retries: int = 0
