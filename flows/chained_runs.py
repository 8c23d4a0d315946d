"""The runs of a chain: each profile after the first starts from the export of the one before it."""

from __future__ import annotations

from collections.abc import Sequence

from modeling.scaling.planned_run import PlannedRun
from profiles import resolve
from profiles.errors import OVERRIDE_SYNTAX, ProfileError, closest
from profiles.local_paths import RUN


def chained_runs(profiles: Sequence[str], overrides: Sequence[str] = (), name: str = "") -> list[PlannedRun]:
    """The runs of a chain of profiles, resolved.

    Args:
        overrides: `KEY=VALUE` for every run, or `PROFILE:KEY=VALUE` for the runs of one profile.
        name: prefix of the runs' names, as in NAME-PROFILE; empty: the profiles' names.

    Raises:
        ProfileError: a profile is invalid, or cannot start from the one before it.
    """
    from modeling.conversion.weights import global_shapes

    if not profiles:
        raise ProfileError("profiles", [], "a chain has at least one profile", ["[tiny, tiny-sft]"])
    found: list[PlannedRun] = []
    for profile in profiles:
        own = _overrides_of(profile, profiles, overrides)
        if found:
            start = f"{RUN}{found[-1].name}"
            own += [f"init={{from: '{start}'}}", f"tokenizer.source={start}", "tokenizer.revision=null"]
        run = resolve.load(profile, own)
        if name:
            run = run.model_copy(update={"name": f"{name}-{run.name}"})
        if run.name in [each.name for each in found]:
            reason = "occurs twice in the chain, and two runs of a store cannot have the same name"
            raise ProfileError("profiles", profile, reason)
        if found and global_shapes(run.model) != global_shapes(found[-1].profile.model):
            reason = f"has a different model from {found[-1].source}, whose export it would start from"
            raise ProfileError("profiles", profile, reason)
        found.append(PlannedRun(profile, run, tuple(own)))
    return found


def load_chain(profiles: Sequence[str], overrides: Sequence[str] = (), name: str = "") -> list[PlannedRun]:
    """`chained_runs` that can start on this machine. Raises ProfileError otherwise, before any work."""
    runs = chained_runs(profiles, overrides, name)
    for each in runs:
        resolve.check(each.profile)
        resolve.check_start(each.profile)
    return runs


def _overrides_of(profile: str, profiles: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """The overrides that apply to one profile of the chain."""
    found = []
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise ProfileError("overrides", override, OVERRIDE_SYNTAX)
        only, colon, own_key = key.rpartition(":")
        if colon and only not in profiles:
            choices = closest(only, profiles)
            raise ProfileError("overrides", override, f"{only} is not a profile of the chain", choices)
        if not colon or only == profile:
            found.append(f"{own_key}={value}")
    return found
