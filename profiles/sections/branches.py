"""Branches file: a trunk of constant learning rate, the branches that decay from its checkpoints, and averages of checkpoints.

`load` reads and validates one. Shipped files are in profiles/branches/.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from profiles.sections.base import NAME, Count, Section
from profiles.sections.experiment import Experiment

TRUNK = "trunk"  # names the trunk among the members of an average


class Branch(Section):
    """A run that starts from a checkpoint of the trunk, and whose rate falls to zero."""

    step: Count = Field(description="step of the trunk's checkpoint; a multiple of `every`")
    decay: Count | None = Field(
        None, description="steps until the rate is zero; null: the file's share `decay` of `step`"
    )
    name: str | None = Field(
        None, pattern=f"^{NAME}$", description="name of the run after the file's; null: of its steps"
    )
    overrides: list[str] = Field([], description="KEY=VALUE of this branch alone, such as another mixture")


class Average(Section):
    """The mean of checkpoints' weights, evaluated and exported."""

    name: str = Field(pattern=f"^{NAME}$", description="name of the average")
    of: list[str] = Field(
        min_length=1, description="runs to average checkpoints of: trunk, trunk@STEP, or names of branches"
    )
    last: Count = Field(1, description="number of checkpoints of each run: the latest, up to STEP")


class Branches(Experiment):
    """A branches file."""

    shipped: ClassVar[Path | None] = Path(__file__).parents[1] / "branches"

    every: Count = Field(description="steps between the trunk's checkpoints, all of which are kept")
    decay: Annotated[float, Field(gt=0, le=1)] = Field(
        0.2, description="default decay of branches, as a share of the steps before them"
    )
    branches: list[Branch] = Field(min_length=1, description="the branches")
    averages: list[Average] = Field([], description="averages of checkpoints")
