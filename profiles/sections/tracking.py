"""The section `tracking`: trackers besides TensorBoard, and the check that they are installed.

Connection settings and keys come from each tracker's own environment variables, so that profiles contain no secrets.
"""

from __future__ import annotations

import difflib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from profiles.errors import ProfileError
from profiles.sections.base import Section

if TYPE_CHECKING:
    from profiles.schema import Profile

TRACKER = r"^[A-Za-z_][\w.]*(:[A-Za-z_]\w*)?$"
TAG = r"^[^\x00-\x1f\x7f]{1,64}$"
TRACKERS = ("wandb", "mlflow", "trackio")  # also the names of their packages and of our extras


class Tracking(Section):
    """Experiment trackers that receive the run's metrics in addition to TensorBoard."""

    trackers: list[Annotated[str, Field(pattern=TRACKER)]] = Field(
        [],
        description="wandb, mlflow, trackio, or your own class, module:Class; none is imported unless named",
    )
    project: Annotated[str, Field(pattern=TAG)] = Field(
        "trainshed", description="W&B or Trackio project, MLflow experiment"
    )
    tags: list[Annotated[str, Field(pattern=TAG)]] = Field(
        [], description="tags in addition to those of every run: profile, parent and cluster"
    )


def check_names(profile: Profile) -> None:
    """Check that trackers are known, and named once. Raises ProfileError."""
    trackers = profile.tracking.trackers
    for number, name in enumerate(trackers):
        key = f"tracking.trackers.{number}"
        if ":" not in name and name not in TRACKERS:
            close = difflib.get_close_matches(name, TRACKERS) or [*TRACKERS, "module:Class"]
            raise ProfileError(key, name, "is not a tracker", close)
        if name in trackers[:number]:
            raise ProfileError(key, name, "is named twice")


def check_installed(profile: Profile) -> None:
    """Check that the packages of the trackers are installed, without importing them. Raises ProfileError."""
    for number, name in enumerate(profile.tracking.trackers):
        if name in TRACKERS and find_spec(name) is None:
            reason = f"is not installed; install it with: pip install -c constraints.txt -e '.[{name}]'"
            raise ProfileError(f"tracking.trackers.{number}", name, reason)
