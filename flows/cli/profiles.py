"""`trainshed profiles`: list the shipped profiles, with size, cluster and whether this machine can start them."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from flows.cli.exit_codes import DONE
from flows.ui.summaries import cluster_summary
from profiles import resolve
from profiles.errors import ProfileError
from profiles.schema import Profile
from tasks.reporting.format import format_count

STARTS, SUBMITS, PLAN_ONLY = "starts here", "submits to Slurm", "plan only"
MEANINGS = {
    STARTS: "`trainshed run` trains on this machine",
    SUBMITS: "`trainshed run` submits a job with sbatch",
    PLAN_ONLY: "`trainshed plan` works, `trainshed run` does not",
}


def run(options: argparse.Namespace) -> int:
    """Print the profiles, smallest model first."""
    profiles = sorted(map(resolve.load, resolve.names()), key=lambda profile: profile.model.parameters)
    if options.json:
        print(json.dumps({profile.name: _describe(profile) for profile in profiles}, indent=1))
    else:
        _print(profiles)
    return DONE


def _print(profiles: list[Profile]) -> None:
    """The table; descriptions are at the end of the lines if all fit there, else below them."""
    statuses = list(map(_status, profiles))
    rows = [
        (profile.name, format_count(profile.model.parameters), cluster_summary(profile), status)
        for profile, (status, _) in zip(profiles, statuses, strict=True)
    ]
    titles = ("profile", "parameters", "nodes × devices", "status")
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)) for row in (titles, *rows)]
    console = Console(highlight=False)
    beside = console.width >= len(lines[0]) + 2 + max(len(profile.description) for profile in profiles)
    console.print(Text(lines[0], "dim"), soft_wrap=True)
    for line, profile in zip(lines[1:], profiles, strict=True):
        description = Text(profile.description, "dim")
        if beside:
            console.print(Text.assemble(line, "  ", description), soft_wrap=True)
        else:
            console.print(Text(line), soft_wrap=True)
            console.print(Padding(description, (0, 0, 0, 2)))
    console.print()
    meanings = {status: [MEANINGS[status]] for status in MEANINGS if status in dict(statuses)}
    for status, reason in dict.fromkeys(statuses):
        if reason:
            meanings[status].append(reason)
    for status, parts in meanings.items():
        legend = Table(box=None, pad_edge=False, show_header=False)
        legend.add_row(Text(status.ljust(widths[-1])), Text(": ".join(parts), "dim"))
        console.print(legend)


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
        return PLAN_ONLY, str(error.with_choices(()))
    return (SUBMITS if profile.cluster.launcher == "slurm" else STARTS), ""
