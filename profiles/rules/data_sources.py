"""Rules of `data.sources`: which keys each kind of source accepts, and rules for all sources together."""

from __future__ import annotations

import glob
import re
from collections.abc import Sequence
from itertools import chain, count
from pathlib import Path

from profiles.errors import ProfileError
from profiles.files import folders, state_files
from profiles.local_paths import local_path, searched
from profiles.schema import Data, Profile, Source

# Keys that only some kinds of sources accept, with these kinds.
KINDS = {
    "path": ("files", "tokens", "megatron"),
    "repository": ("hub",),
    "config": ("hub",),
    "revision": ("hub",),
    "streaming": ("hub",),
    "lines": ("files",),
    "anonymous": ("files", "tokens", "megatron"),
}
REQUIRED = {"files": "path", "tokens": "path", "megatron": "path", "hub": "repository"}
REPOSITORY = re.compile(r"[\w.-]+(/[\w.-]+)?")


def names(data: Data) -> list[str]:
    """Name of each source, in order: from its repository, path or kind, numbered if two are the same."""
    found: list[str] = []
    for source in data.sources:
        base = (source.repository or source.path or source.kind).rstrip("/").rpartition("/")[2]
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", base.partition(".")[0]).strip("-") or source.kind
        free = chain([name], (f"{name}-{number}" for number in count(2)))
        found.append(next(each for each in free if each not in found))
    return found


def check(profile: Profile) -> None:
    """Check that every source can be read as described. Raises ProfileError for the first broken rule."""
    for number, source in enumerate(profile.data.sources):
        check_source(source, f"data.sources.{number}")
    check_weights(profile.data, "data.sources")
    uses = [source.use for source in profile.data.sources]
    if not profile.data.validation_fraction and all(use != "validation" for use in uses):
        reason = "leaves no validation data; hold some out, or add a source with use: validation"
        raise ProfileError("data.validation_fraction", 0, reason, [0.01])


def check_weights(data: Data, key: str) -> None:
    """Check that sources have training data, and all or none of them a weight. Raises ProfileError."""
    weights = [source.weight for source in data.sources if source.use != "validation"]
    if any(weights) and not all(weights):
        without = weights.index(None)
        reason = "is missing: if one training source has a weight, all need one"
        raise ProfileError(f"{key}.{without}.weight", None, reason)
    if not weights:
        reason = "is validation for every source; at least one must have training data"
        raise ProfileError(f"{key}.0.use", "validation", reason, ["split", "train"])


def check_schedule(profile: Profile) -> None:
    """Check the changes of the mixture. Raises ProfileError for the first rule that is broken."""
    changes, steps = profile.data.schedule, profile.train.steps
    if not changes:
        return
    if profile.objective.traits.reads_records:
        reason = f"only applies to objective.kind pretrain, not {profile.objective.kind}"
        raise ProfileError("data.schedule", None, reason)
    sources = [source for source in profile.data.sources if source.use != "validation"]
    if any(source.weight is None for source in sources):
        reason = "changes weights, and the sources have none; set the weight of every training source"
        raise ProfileError("data.schedule", None, reason)
    before = 0
    for number, change in enumerate(changes):
        key = f"data.schedule.{number}"
        if len(change.weights) != len(sources):
            reason = f"has {len(change.weights)} weights for {len(sources)} training sources"
            raise ProfileError(f"{key}.weights", change.weights, reason)
        if not any(change.weights):
            raise ProfileError(f"{key}.weights", change.weights, "are all zero")
        if change.step <= before:
            reason = f"is not after step {before} of the change before it"
            raise ProfileError(f"{key}.step", change.step, reason, [before + 1])
        if steps is not None and change.step > steps:
            reason = f"is after the last step, train.steps {steps}"
            raise ProfileError(f"{key}.step", change.step, reason, [steps])
        before = change.step


def check_files(profile: Profile) -> None:
    """Raise ProfileError if a source's local files are missing; buckets and hub are checked when read."""
    check_local_files(profile.data.sources, "data.sources")


def check_local_files(sources: Sequence[Source], key: str) -> None:
    """Check the local files of sources, which `key` lists.

    Raises ProfileError if some are missing or empty, OSError if that is unknown.
    """
    for number, source in enumerate(sources):
        if source.path is not None and "://" not in source.path:
            path_key = f"{key}.{number}.path"
            try:
                _check_local_path(source.kind, source.path, path_key)
            except OSError as error:
                reason = f"{path_key} = {source.path}: cannot be read: {error.strerror}"
                raise OSError(error.errno, reason, error.filename) from error


def check_source(source: Source, key: str) -> None:
    """Check that a source has the keys of its kind. Raises ProfileError."""
    for name, kinds in KINDS.items():
        value = getattr(source, name)
        if value not in (None, False) and source.kind not in kinds:
            reason = f"does not apply to sources of kind {source.kind}"
            raise ProfileError(f"{key}.{name}", value, reason, ["null", f"{key}.kind={kinds[0]}"])
    required = REQUIRED.get(source.kind)
    if required and getattr(source, required) is None:
        raise ProfileError(f"{key}.{required}", None, f"is missing: a source of kind {source.kind} needs one")
    if source.weight is not None and source.use == "validation":
        raise ProfileError(f"{key}.weight", source.weight, "only applies to training sources", ["null"])
    if source.repository is not None and not REPOSITORY.fullmatch(source.repository):
        raise ProfileError(f"{key}.repository", source.repository, "is not of the form org/name")
    path = source.path or ""
    if "://" in path and "::" in path:
        reason = "has `::`, which chains fsspec locations; give one location, with the files unpacked"
        raise ProfileError(f"{key}.path", source.path, reason)
    if source.anonymous and not path.startswith("s3://"):
        raise ProfileError(f"{key}.anonymous", True, "only applies to s3:// paths", [False])


def _check_local_path(kind: str, given: str, key: str) -> None:
    path = str(local_path(given))
    is_prefix = kind == "megatron" and state_files.is_file(Path(f"{path}.idx"))
    if not is_prefix and not state_files.exists(Path(path)) and not any(folders.find(Path("/"), path[1:])):
        reason = "no file matches" if glob.has_magic(given) else "there is no such file or folder"
        raise ProfileError(key, given, reason + searched(given))
    if state_files.is_file(Path(path)) and not Path(path).stat().st_size:
        raise ProfileError(key, given, "the file is empty" + searched(given))
