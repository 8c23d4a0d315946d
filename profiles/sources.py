"""The rules of `data.sources`: which keys each kind of source takes, and what all of them together must be."""

from __future__ import annotations

import glob
import re
from pathlib import Path

from profiles.errors import ProfileError
from profiles.schema import Profile, Source

# Keys that say where a source lies, or how it is read, by the kinds that take them.
KINDS = {
    "path": ("files", "tokens", "megatron"),
    "repository": ("hub",),
    "config": ("hub",),
    "revision": ("hub",),
    "streaming": ("hub",),
    "lines": ("files",),
    "anonymous": ("files", "tokens", "megatron"),
}
NEEDED = {"files": "path", "tokens": "path", "megatron": "path", "hub": "repository"}
REPOSITORY = re.compile(r"[\w.-]+(/[\w.-]+)?")


def check(profile: Profile) -> None:
    """Refuse sources that cannot be read as they are described.

    Raises:
        ProfileError: the first such thing.
    """
    for number, source in enumerate(profile.data.sources):
        _check(source, f"data.sources.{number}")
    uses = [source.use for source in profile.data.sources]
    weights = [source.weight for source in profile.data.sources if source.use != "validation"]
    if any(weights) and not all(weights):
        without = weights.index(None)
        reason = "is missing: where one source has a weight, all that are trained on need one"
        raise ProfileError(f"data.sources.{without}.weight", None, reason)
    if not profile.data.validation_fraction and all(use != "validation" for use in uses):
        reason = "leaves nothing to evaluate the model on; hold some out, or give a source of use validation"
        raise ProfileError("data.validation_fraction", 0, reason, [0.01])
    if not weights:
        reason = "is of validation only, as all are; one must be trained on"
        raise ProfileError("data.sources.0.use", "validation", reason, ["split", "train"])


def _check(source: Source, key: str) -> None:
    for name, kinds in KINDS.items():
        value = getattr(source, name)
        if value not in (None, False) and source.kind not in kinds:
            raise ProfileError(f"{key}.{name}", value, f"is not for sources of kind {source.kind}", ["null"])
    needed = NEEDED.get(source.kind)
    if needed and getattr(source, needed) is None:
        raise ProfileError(f"{key}.{needed}", None, f"is missing: a source of kind {source.kind} needs one")
    if source.weight is not None and source.use == "validation":
        raise ProfileError(f"{key}.weight", source.weight, "is for sources that are trained on", ["null"])
    if source.repository is not None and not REPOSITORY.fullmatch(source.repository):
        raise ProfileError(f"{key}.repository", source.repository, "is not of the form org/name")
    if source.anonymous and not source.path.startswith("s3://"):
        raise ProfileError(f"{key}.anonymous", True, "is for s3:// paths", [False])
    if source.path is not None and "://" not in source.path:
        _on_this_machine(source, f"{key}.path")


def _on_this_machine(source: Source, key: str) -> None:
    """Whether a bucket or the hub has it is found out when it is read."""
    path = str(Path(source.path).expanduser())
    prefix = source.kind == "megatron" and Path(f"{path}.idx").is_file()
    if not prefix and not Path(path).exists() and not glob.glob(path, recursive=True):
        magic = glob.has_magic(source.path)
        raise ProfileError(
            key, source.path, "no file matches" if magic else "there is no such file or folder"
        )
