"""Rules of `continual`: its stand-in sources, and what its schedules need."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from profiles.errors import ProfileError
from profiles.files import state_files
from profiles.local_paths import local_path, searched
from profiles.rules import data_sources, objectives
from profiles.schema import Data, Profile
from profiles.sections.objective import OBJECTIVES


def check_round(profile: Profile) -> None:
    """Check that a profile can be trained in rounds. Raises ProfileError."""
    if why := profile.objective.traits.no_rounds:
        reason = f"is not supported in continual pretraining: {why}; repeat it on the promoted model with init.from"
        choices = [kind for kind, traits in OBJECTIVES.items() if not traits.no_rounds]
        raise ProfileError("objective.kind", profile.objective.kind, reason, choices)


def check_same_training(profile: Profile, promoted: Profile) -> None:
    """Check that the promoted model's weights and records fit a round.

    Raises ProfileError.
    """
    keys = ["objective.kind", "lora.rank"]
    keys += ["lora.alpha", "lora.targets"] if profile.lora.rank else []
    for key in keys:
        get = attrgetter(key)
        _require_same(key, get(profile), get(promoted), promoted.name)
    if not profile.objective.traits.reads_records:
        return
    length = promoted.train.sequence_length
    _require_same("train.sequence_length", profile.train.sequence_length, length, promoted.name)
    _require_same("objective.packing", profile.packs, promoted.packs, promoted.name)


def _require_same(key: str, ours: Any, theirs: Any, name: str) -> None:
    if ours != theirs:
        reason = f"differs from that of {name}, the promoted model, which a round trains further"
        raise ProfileError(
            key, "null" if ours is None else ours, reason, ["null" if theirs is None else theirs]
        )


def check(profile: Profile) -> None:
    """Check the section. Raises ProfileError for the first broken rule."""
    settings, kind = profile.continual, profile.objective.kind
    reads_records = profile.objective.traits.reads_records
    if settings.replay_from == "generated" and reads_records:
        reason = f"samples text, and objective.kind {kind} trains on records"
        raise ProfileError("continual.replay_from", "generated", reason, ["history"])
    if settings.include and not any(gate.on.startswith("task:") for gate in settings.gates):
        reason = "has no effect: no gate of continual.gates is on a task, as task:NAME"
        raise ProfileError("continual.include", settings.include, reason, ["null"])
    if not settings.stand_in:
        return
    if settings.replay_from == "generated":
        reason = "stands for earlier data, and so does generated text; choose one"
        raise ProfileError("continual.stand_in", None, reason, ["[]", "continual.replay_from=history"])
    for number, source in enumerate(settings.stand_in):
        key = f"continual.stand_in.{number}"
        data_sources.check_source(source, key)
    if reads_records:
        objectives.check_records(settings.stand_in, "continual.stand_in", kind)
    data_sources.check_weights(stand_in_data(profile), "continual.stand_in")


def check_files(profile: Profile) -> None:
    """Raise ProfileError if local files of a stand-in source, or the folder of task files, are missing."""
    data_sources.check_local_files(profile.continual.stand_in, "continual.stand_in")
    include = profile.continual.include
    if include and not state_files.is_dir(local_path(include)):
        reason = f"is not a folder with task files{searched(include)}"
        raise ProfileError("continual.include", include, reason)


def stand_in_data(profile: Profile) -> Data:
    """The data section with the stand-in sources in place of the profile's."""
    return profile.data.model_copy(update={"sources": profile.continual.stand_in, "schedule": []})
