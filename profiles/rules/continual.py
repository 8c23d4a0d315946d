"""Rules of `continual`: its stand-in sources, and what its schedules need."""

from __future__ import annotations

from profiles.errors import ProfileError
from profiles.rules import data_sources, objectives
from profiles.schema import Data, Profile


def check(profile: Profile) -> None:
    """Check the section. Raises ProfileError for the first broken rule."""
    settings, kind = profile.continual, profile.objective.kind
    if not settings.stand_in:
        return
    if settings.replay_from == "generated":
        reason = "stands for earlier data, and so does generated text; choose one"
        raise ProfileError("continual.stand_in", None, reason, ["[]", "continual.replay_from=history"])
    for number, source in enumerate(settings.stand_in):
        key = f"continual.stand_in.{number}"
        data_sources.check_source(source, key)
    if kind != "pretrain":
        objectives.check_records(settings.stand_in, "continual.stand_in", kind)
    data_sources.check_weights(stand_in_data(profile), "continual.stand_in")


def check_files(profile: Profile) -> None:
    """Raise ProfileError if local files of a stand-in source are missing."""
    data_sources.check_local_files(profile.continual.stand_in, "continual.stand_in")


def stand_in_data(profile: Profile) -> Data:
    """The data section with the stand-in sources in place of the profile's."""
    return profile.data.model_copy(update={"sources": profile.continual.stand_in, "schedule": []})
