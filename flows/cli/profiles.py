"""`trainshed profiles`: the profiles that come with Trainshed, their size, their cluster, and whether they can start here."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from rich.console import Console
from rich.table import Table

from profiles import resolve
from profiles.errors import ProfileError
from profiles.schema import Profile
from tasks.reporting.format import format_count


def show(*, as_json: bool) -> int:
    """Print them, smallest first; as JSON by name."""
    found = sorted(map(resolve.load, resolve.names()), key=lambda profile: profile.model.parameters)
    if as_json:
        print(json.dumps({profile.name: _describe(profile) for profile in found}, indent=1))
        return 0
    rows = [
        (profile.name, format_count(profile.model.parameters), _cluster(profile), _status(profile)[0])
        for profile in found
    ]
    listed = Table(box=None, pad_edge=False, header_style="dim", expand=True)
    for column, cells in zip(
        ("profile", "parameters", "cluster", "status"), zip(*rows, strict=True), strict=True
    ):
        listed.add_column(column, no_wrap=True, min_width=max(map(len, cells)))
    listed.add_column("", style="dim", no_wrap=True, overflow="ellipsis", ratio=1)
    for row, profile in zip(rows, found, strict=True):
        listed.add_row(*row, profile.description)
    console = Console(highlight=False)
    console.print(listed)
    for reason, count in Counter(reason for _, reason in map(_status, found) if reason).items():
        console.print(f"plan only, {count} of them: {reason}", style="dim")
    return 0


def _describe(profile: Profile) -> dict[str, Any]:
    cluster = profile.cluster
    status, reason = _status(profile)
    return {
        "description": profile.description,
        "parameters": profile.model.parameters,
        "cluster": {
            "launcher": cluster.launcher,
            "nodes": cluster.nodes,
            "devices_per_node": cluster.devices_per_node,
            "device": cluster.accelerator or cluster.device,
        },
        "status": status,
        "reason": reason,
    }


def _cluster(profile: Profile) -> str:
    cluster = profile.cluster
    return f"{cluster.nodes} × {cluster.devices_per_node} {cluster.accelerator or cluster.device}"


def _status(profile: Profile) -> tuple[str, str]:
    """Whether this machine could start it, and what keeps it from that."""
    try:
        resolve.check(profile)
        resolve.check_start(profile)
    except ProfileError as error:
        return "plan only", str(error)
    return ("submits from here" if profile.cluster.launcher == "slurm" else "starts here"), ""
