"""Renamed keys: rejected in profiles, read in those of existing runs, and kept in digests.

Run folders and checkpoints contain resolved profiles, whose keys have the names of the version that wrote them. A copy that is
still complete is read like them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RENAMED = {  # by the old name
    "train.minimum_steps": "train.minimum_rate_steps",
    "train.replicas_every": "train.check_replicas_every",
    "checkpoint.weights": "checkpoint.weights_only",
}


def current(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a resolved profile, with the current names of its keys."""
    renamed = dict(values)
    for old, new in RENAMED.items():
        section, _, key = old.partition(".")
        name = new.partition(".")[2]
        if isinstance(keys := renamed.get(section), Mapping) and key in keys and name not in keys:
            renamed[section] = {name: keys[key], **{each: keys[each] for each in keys if each != key}}
    return renamed


def original(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a section with the first names of its keys, by which they enter digests."""
    names = {new: old.partition(".")[2] for old, new in RENAMED.items()}
    return {names.get(f"{section}.{name}", name): value for name, value in values.items()}
