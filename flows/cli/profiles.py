"""`trainshed profiles`: list the shipped profiles, with size, cluster and whether this machine can start them."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from typing import Any

from rich.console import Console
from rich.table import Table

from flows.cli.exit_codes import DONE
from flows.ui.summaries import cluster_summary
from profiles import resolve
from profiles.errors import ProfileError
from profiles.schema import Profile
from tasks.reporting.format import format_count


def run(options: argparse.Namespace) -> int:
    """Print the profiles, smallest model first."""
    profiles = sorted(map(resolve.load, resolve.names()), key=lambda profile: profile.model.parameters)
    if options.json:
        print(json.dumps({profile.name: _describe(profile) for profile in profiles}, indent=1))
    else:
        _print(profiles)
    return DONE


def _print(profiles: list[Profile]) -> None:
    statuses = list(map(_status, profiles))
    rows = [
        (profile.name, format_count(profile.model.parameters), cluster_summary(profile), status)
        for profile, (status, _) in zip(profiles, statuses, strict=True)
    ]
    table = Table(box=None, pad_edge=False, header_style="dim", expand=True)
    titles = ("profile", "parameters", "cluster", "status")
    for title, column in zip(titles, zip(*rows, strict=True), strict=True):
        table.add_column(title, no_wrap=True, min_width=max(map(len, column)))
    table.add_column("", style="dim", no_wrap=True, overflow="ellipsis", ratio=1)
    for row, profile in zip(rows, profiles, strict=True):
        table.add_row(*row, profile.description)
    console = Console(highlight=False)
    console.print(table)
    for reason, count in Counter(reason for _, reason in statuses if reason).items():
        console.print(f"plan only ({count} profiles): {reason}", style="dim")


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


def _status(profile: Profile) -> tuple[str, str]:
    """Whether this machine can start the profile, and why not."""
    try:
        resolve.check(profile)
        resolve.check_start(profile)
    except ProfileError as error:
        return "plan only", str(error)
    return ("submits from here" if profile.cluster.launcher == "slurm" else "starts here"), ""
