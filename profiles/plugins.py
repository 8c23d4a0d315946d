"""Objects of installed packages, found by their entry points: model families and launchers.

`parallel.attention.kernels` finds attention kernels in the same way; it may not import this package.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata
from typing import Any

from profiles.errors import ProfileError, closest


def names(group: str) -> list[str]:
    """Names of the group's entry points."""
    return [point.name for point in metadata.entry_points(group=group)]


def find(group: str, name: str, key: str, own: Iterable[str]) -> metadata.EntryPoint:
    """The entry point of this name, which is not imported.

    Args:
        key: of the profile, whose value is the name.
        own: names that need no entry point, for the error.

    Raises:
        ProfileError: there is none, or several packages have it.
    """
    found = {point.value: point for point in metadata.entry_points(group=group, name=name)}
    if not found:
        reason = f"is not one of the choices: neither Trainshed's nor an entry point of the group {group}"
        raise ProfileError(key, name, reason, closest(name, [*own, *names(group)]))
    if len(found) > 1:
        raise ProfileError(key, name, f"is in several packages: {', '.join(sorted(found))}")
    return next(iter(found.values()))


def load(point: metadata.EntryPoint, key: str) -> Any:
    """Import the object of an entry point. Raises ProfileError naming the key: it cannot be imported."""
    try:
        return point.load()
    except (ImportError, AttributeError) as error:
        raise ProfileError(key, point.name, f"{point.value} cannot be imported: {error}") from error
