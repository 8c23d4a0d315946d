"""Base of ladder, mixture and branches files: a target profile, and runs for it within a budget."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from profiles.sections.base import NAME, Count, Section


class Experiment(Section):
    """The target, and the settings of all runs."""

    name: str = Field(
        pattern=f"^{NAME}$", description="name of the experiment; names of its runs begin with it"
    )
    description: str = Field(default="", description="one-line description")
    target: str = Field(min_length=1, description="target profile: a name, or a path relative to this file")
    overrides: list[str] = Field(default=[], description="KEY=VALUE for the target and every run")
    devices: Count | None = Field(
        default=None,
        description="devices that runs may use at the same time; null: as many as the largest run uses",
    )
    maximum_flops: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="budget for all runs in training FLOPs; more is rejected"
    )
    maximum_price: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="budget for all runs in the currency of cluster.node_price; more is rejected",
    )

    shipped: ClassVar[Path | None] = None  # folder of shipped files: .yml, because profiles are .yaml


class SmallRuns(Experiment):
    """Runs of the target's family that are smaller or shorter."""

    batch_exponent: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="batch size ∝ training tokens to this power, and learning rate ∝ √batch (arXiv 2410.21676, 2205.10287); "
        "0: the target's batch for every run",
    )
