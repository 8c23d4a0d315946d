"""`trainshed mixture share FILE`: train proxies of a series' next round; propose its replay share."""

from __future__ import annotations

import argparse
import shlex
from typing import Any

from rich.console import Console
from rich.table import Table

from flows.cli import run as run_command
from flows.cli.experiments.table import print_tables
from flows.experiments.plans import load_share, require_startable
from flows.ui.console import print_facts, relative
from profiles.errors import ProfileError


def run(options: argparse.Namespace) -> int:
    """Find a share; returns the exit code.

    Raises ProfileError for an invalid file, or a series without new data.
    """
    if options.check:
        raise ProfileError("--check", None, "has no effect with share; train a round with the proposed share")
    described, target, base = load_share(options.file)
    require_startable([base])

    def start() -> dict[str, Any]:
        from flows.experiments.share import share as flow

        return flow(options.file, options.store)

    return run_command.run_flow(options, target.profile, described.name, start, print_result)


def print_result(console: Console, result: dict[str, Any]) -> None:
    """Print the proxies' losses, the expected ones, the proposed share, and how to apply it."""
    proxies = Table("share of replay", "old loss", "new loss", box=None, pad_edge=False)
    for proxy in result["proxies"]:
        proxies.add_row(f"{proxy['share']:.1%}", *(f"{loss:.4f}" for loss in proxy["losses"].values()))
    interval = f"{result['probability']:.0%} interval"
    losses = Table("held-out loss", "before", "proposed", interval, "change", box=None, pad_edge=False)
    for row in result["losses"]:
        low, high = row["interval"]
        change = f"{row['loss'] - row['before']:+.4f}"
        losses.add_row(
            row["set"], f"{row['before']:.4f}", f"{row['loss']:.4f}", f"{low:.4f} to {high:.4f}", change
        )
    print_tables(console, proxies, losses)
    low, high = result["interval"]
    facts = {"share": f"{result['share']:.1%}, best of each draw {low:.1%} to {high:.1%}"}
    if not result["meets"]:
        facts["gate"] = f"no share keeps the rise of the old loss within {result['limit']:g}"
    facts["settings"] = " ".join(f"--set {shlex.quote(override)}" for override in result["overrides"])
    facts["page"] = relative(result["page"])
    print_facts(console, facts)
