"""The section `tracking`: trackers besides TensorBoard.

Connection settings and keys come from each tracker's own environment variables, so that profiles contain no secrets.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from profiles.sections import roles
from profiles.sections.base import Section

TRACKER = r"^[A-Za-z_][\w.]*(:[A-Za-z_]\w*)?$"
TAG = r"^[^\x00-\x1f\x7f]{1,64}$"
TRACKERS = ("wandb", "mlflow", "trackio")  # also the names of their packages and of our extras


class Tracking(Section):
    """Experiment trackers that receive the run's metrics in addition to TensorBoard."""

    default_role = roles.NONE

    trackers: list[Annotated[str, Field(pattern=TRACKER)]] = Field(default=[])
    """wandb, mlflow, trackio, or your own class, module:Class; none is imported unless named"""
    project: Annotated[str, Field(pattern=TAG)] = "trainshed"
    """W&B or Trackio project, MLflow experiment"""
    tags: list[Annotated[str, Field(pattern=TAG)]] = Field(default=[])
    """tags in addition to those of every run: profile, parent and cluster"""
