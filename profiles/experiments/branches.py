"""Branches file: a constant-rate trunk, branches that decay from its checkpoints, and averages.

Shipped files are in profiles/shipped/branches/.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from profiles.experiments.experiment import Experiment
from profiles.sections.base import NAME, Count, Section

TRUNK = "trunk"  # name of the trunk among the members of an average


class Branch(Section):
    """A run that starts from a checkpoint of the trunk and decays the learning rate to zero."""

    step: Count = Field(description="step of the trunk's checkpoint; a multiple of `every`")
    decay: Count | None = Field(
        default=None, description="decay steps; null: the file's `decay` as a share of `step`"
    )
    name: str | None = Field(
        default=None,
        pattern=f"^{NAME}$",
        description="suffix of the run's name; null: derived from its steps",
    )
    overrides: list[str] = Field(
        default=[], description="KEY=VALUE for this branch only, such as another mixture"
    )


class Average(Section):
    """The mean of checkpoints' weights, evaluated and exported."""

    name: str = Field(pattern=f"^{NAME}$", description="name of the average")
    of: list[str] = Field(
        min_length=1, description="runs to average checkpoints of: trunk, trunk@STEP, or names of branches"
    )
    last: Count = Field(default=1, description="number of latest checkpoints of each run, up to STEP")


class Branches(Experiment):
    """A branches file."""

    page: ClassVar[str] = "docs/training/branches.md"
    shipped: ClassVar[Path | None] = Path(__file__).parents[1] / "shipped/branches"

    every: Count = Field(description="steps between the trunk's checkpoints, all of which are kept")
    decay: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.2, description="default decay of branches, as a share of the steps before them"
    )
    branches: list[Branch] = Field(min_length=1, description="the branches")
    averages: list[Average] = Field(default=[], description="averages of checkpoints")
