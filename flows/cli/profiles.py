"""`trainshed profiles`: list shipped profiles with size, cluster and whether they can start here."""

from __future__ import annotations

import argparse
from difflib import get_close_matches
from typing import Any

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from flows.cli.exit_codes import DONE
from flows.ui.console import TrimmedConsole, print_json
from flows.ui.summaries import cluster_summary
from profiles import resolve
from profiles.errors import ProfileError
from profiles.schema import Profile
from tasks.reporting.format import format_count

STARTS, SUBMITS, ELSEWHERE = "runs here", "submits to Slurm", "on its cluster"
MEANINGS = {
    STARTS: "`trainshed run {name}` trains on this machine",
    SUBMITS: "`trainshed run {name}` submits a job with sbatch",
    ELSEWHERE: "`trainshed run {name}` starts on the cluster that the profile names, and is rejected here",
}
EXAMPLE = "llama3-8b"  # in the legend, if it has the status


def run(options: argparse.Namespace) -> int:
    """Print the profiles, smallest model first."""
    profiles = sorted(map(resolve.load, _names(options.word)), key=lambda profile: profile.model.parameters)
    if options.json:
        print_json({profile.name: _describe(profile) for profile in profiles})
    else:
        _print(profiles)
    return DONE


def _names(word: str) -> list[str]:
    """Names of profiles that contain a word. Raises ProfileError if there are none."""
    names = resolve.names()
    found = [name for name in names if word.lower() in name]
    if not found:
        words = {part for name in names for part in (name, *name.split("-"))}
        nearest = get_close_matches(word.lower(), sorted(words))
        raise ProfileError(
            "WORD", word, "no profile has it in its name; `trainshed profiles` lists all", nearest
        )
    return found


def _print(profiles: list[Profile]) -> None:
    """Print the legend and the table; descriptions go at the end of the lines if all fit, else below them."""
    statuses = list(map(_status, profiles))
    rows = [
        (profile.name, format_count(profile.model.parameters), cluster_summary(profile), status)
        for profile, (status, _) in zip(profiles, statuses, strict=True)
    ]
    titles = ("profile", "parameters", "nodes × devices", "status")
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)) for row in (titles, *rows)]
    console = TrimmedConsole()
    meanings = {}
    for status in MEANINGS:
        names = [
            profile.name for profile, (found, _) in zip(profiles, statuses, strict=True) if found == status
        ]
        if names:
            meanings[status] = [MEANINGS[status].format(name=EXAMPLE if EXAMPLE in names else names[0])]
    for status, reason in dict.fromkeys(statuses):
        if reason:
            meanings[status].append(reason)
    for status, parts in meanings.items():
        legend = Table(box=None, pad_edge=False, show_header=False)
        legend.add_row(Text(status.ljust(widths[-1])), Text(": ".join(parts), "dim"))
        console.print(legend)
    console.print()
    beside = console.width >= len(lines[0]) + 2 + max(len(profile.description) for profile in profiles)
    console.print(Text(lines[0], "dim"), soft_wrap=True)
    for line, profile in zip(lines[1:], profiles, strict=True):
        description = Text(profile.description, "dim")
        if beside:
            console.print(Text.assemble(line, "  ", description), soft_wrap=True)
        else:
            console.print(Text(line), soft_wrap=True)
            console.print(Padding(description, (0, 0, 0, 2)))


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
    """Where the profile starts, and why not here."""
    try:
        resolve.check(profile)
        resolve.check_start(profile)
    except ProfileError as error:
        return ELSEWHERE, str(error.with_choices(()))
    except OSError as error:
        return ELSEWHERE, str(error)
    return (SUBMITS if profile.cluster.launcher == "slurm" else STARTS), ""
