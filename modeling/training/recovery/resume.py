"""Resume requests: the checkpoint that a profile asks for, and rejection of checkpoints of other runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from parallel.checkpoint import checkpoint
from parallel.checkpoint.checkpoint import Location
from profiles.schema import Profile
from profiles.sections.model import PARAMETRIZATION


class Rejected(ValueError):
    """The checkpoint to resume from does not exist, or belongs to another model."""


@dataclass(frozen=True)
class ResumeRequest:
    """What `checkpoint.resume` and `checkpoint.weights` ask for."""

    resume: str | int = "newest"
    weights: bool = False

    def step(self, saved: dict[int, Location]) -> int | None:
        """Requested checkpoint's step, None if there is none to use. Raises Rejected if it is not complete."""
        if self.resume == "none":
            return None
        if self.resume == "newest":
            return max(saved, default=None)
        if self.resume not in saved:
            available = ", ".join(map(str, saved)) or "none"
            raise Rejected(
                f"checkpoint.resume = {self.resume}: is not a complete checkpoint; complete checkpoints are {available}"
            )
        return int(self.resume)


def reject_beyond_last_step(profile: Profile, saved: dict[int, Location]) -> None:
    """Raise `Rejected` for a checkpoint of a step after the run's last: another run's, or copied by hand."""
    for step, source in saved.items():
        if step > profile.train.steps:
            raise Rejected(
                f"{source}: its step is after the run's last, train.steps = {profile.train.steps}; raise train.steps to "
                "continue from it, or move the folder away"
            )


def check_same_model(profile: Profile, marker: dict[str, Any], source: Location) -> None:
    """Raise `Rejected` with the first model field in which a checkpoint differs from the profile.

    Fields that a checkpoint of an earlier version lacks have their defaults.
    """
    ours = profile.model.model_dump(mode="json")
    theirs = marker.get("profile", {}).get("model", ours)
    if theirs is not ours:
        theirs = {**dict.fromkeys(PARAMETRIZATION), "parametrization": "standard", **theirs}
    for name in ours | theirs:
        if ours.get(name) != theirs.get(name):
            raise Rejected(
                f"{checkpoint.name_of(source)} belongs to another model: model.{name} is {theirs.get(name)} in the "
                f"checkpoint, {ours.get(name)} in the profile"
            )
