"""Ladder file: small runs whose losses forecast that of a target profile."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from profiles.experiments.experiment import SmallRuns
from profiles.sections.base import Count, Section, Size


class RungSize(Section):
    """Runs of one size, a width and a depth in the target's family, trained for several lengths."""

    hidden_size: Size = Field(description="width; a multiple of the target's head size, which rungs keep")
    num_hidden_layers: Count | None = Field(default=None, description="depth; null: the target's")
    tokens_per_parameter: list[Annotated[float, Field(gt=0)]] = Field(
        min_length=1,
        description="lengths, one run each: training tokens / N, the multiply-adds per token; 20 is Chinchilla's",
    )


class Ladder(SmallRuns):
    """A ladder file."""

    page: ClassVar[str] = "docs/training/ladder.md"
    shipped: ClassVar[Path | None] = Path(__file__).parents[1] / "shipped/ladders"

    rung_overrides: list[str] = Field(
        default=[], description="KEY=VALUE for the rungs only, such as fewer devices; not the mathematics"
    )
    rungs: list[RungSize] = Field(min_length=1, description="sizes of the rungs, each with its lengths")
