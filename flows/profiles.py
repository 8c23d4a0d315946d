"""`trainshed profiles`: the profiles that come with Trainshed, their size, their cluster, and whether they can start here."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table

from profiles import resolve
from profiles.errors import ProfileError
from profiles.schema import Profile
from tasks.text import in_words


def show(*, as_json: bool) -> int:
    """Print them, smallest first; as JSON by name."""
    found = sorted(map(resolve.load, resolve.names()), key=lambda profile: profile.model.parameters)
    if as_json:
        print(json.dumps({profile.name: _describe(profile) for profile in found}, indent=1))
        return 0
    listed = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("profile", "parameters", "cluster", "status"):
        listed.add_column(column, no_wrap=True)
    listed.add_column("", style="dim", no_wrap=True, overflow="ellipsis")
    for profile in found:
        size = in_words(profile.model.parameters)
        listed.add_row(profile.name, size, _cluster(profile), _status(profile), profile.description)
    Console(highlight=False).print(listed)
    return 0


def _describe(profile: Profile) -> dict[str, Any]:
    cluster = profile.cluster
    return {
        "description": profile.description,
        "parameters": profile.model.parameters,
        "cluster": {
            "launcher": cluster.launcher,
            "nodes": cluster.nodes,
            "devices_per_node": cluster.devices_per_node,
            "device": cluster.accelerator or cluster.device,
        },
        "status": _status(profile),
    }


def _cluster(profile: Profile) -> str:
    cluster = profile.cluster
    return f"{cluster.nodes} × {cluster.devices_per_node} {cluster.accelerator or cluster.device}"


def _status(profile: Profile) -> str:
    """Whether this machine could start it, or what keeps it from that."""
    try:
        resolve.check(profile)
        resolve.check_start(profile)
    except ProfileError as error:
        return f"{error.key}: {error.reason}"
    return "starts here"
