"""Outcome of one step of a flow, shown by the console, the run's page and the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """How a step of a flow ended."""

    step: str
    how: str  # "running", "done", "cached", "skipped", "stopped" or "failed"
    # Duration; of a cached step, the time its artifact took when it was made; None if unknown.
    seconds: float | None
    note: str = ""  # one line for the reader, for example why a step was skipped
    summary: Mapping[str, Any] = field(default_factory=dict)  # summary of the step's artifact
    retries: int = 0  # failed attempts before this one
