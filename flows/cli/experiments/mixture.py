"""`trainshed mixture plan|run|share FILE`: plan proxies, or train them and propose weights or a share."""

from __future__ import annotations

import argparse
import shlex
from typing import Any

from rich.console import Console
from rich.table import Table

from flows.cli import run as run_command
from flows.cli.exit_codes import DONE
from flows.cli.experiments import share
from flows.cli.experiments.table import print_plan, print_tables, row_of, total_of
from flows.experiments.plans import load_mixture, require_startable
from flows.ui.console import print_facts, relative
from modeling.scaling.proxies import Proxy
from tasks.reporting.mixture_page import source_label

SAME = ("batch", "learning_rate")  # for all proxies, so the table omits them


def run(options: argparse.Namespace) -> int:
    """Plan or run a mixture; returns the exit code. Raises ProfileError for an invalid one."""
    if options.action == "plan":
        return _plan(options)
    if options.action == "share":
        return share.run(options)
    mixture, target, proxies, _ = load_mixture(options.file)
    require_startable([proxy.run for proxy in proxies])

    def start() -> dict[str, Any]:
        from flows.experiments.mixture import mixture as flow

        return flow(options.file, options.store, options.check)

    return run_command.run_flow(options, target.profile, mixture.name, start, print_result)


def _plan(options: argparse.Namespace) -> int:
    mixture, _, proxies, plans = load_mixture(options.file)
    rows = [
        {**row_of(proxy.run, planned), "weights": proxy.weights, "mixture": _percent(proxy)}
        for proxy, planned in zip(proxies, plans, strict=True)
    ]
    total = total_of(rows, "all proxies")
    found = {"mixture": mixture.name, "proxies": rows, "total": total}
    print_plan(options, found, [*rows, total], mixture.name, without=SAME)
    return DONE


def _percent(proxy: Proxy) -> str:
    """Weights of a proxy in percent, in the order of its sources."""
    return (
        " ".join(f"{100 * weight:.0f}" for weight in proxy.weights.values()) if proxy.weights else "natural"
    )


def print_result(console: Console, result: dict[str, Any]) -> None:
    """Print weights and losses by source, how to apply the weights, and the path of the page."""
    share = f"{result['share']:.0%} interval"
    losses = Table("held-out loss", "natural", "proposed", share, "change", box=None, pad_edge=False)
    for row in result["losses"]:
        low, high = row["interval"]
        values = f"{row['natural']:.4f}", f"{row['loss']:.4f}", f"{low:.4f} to {high:.4f}"
        losses.add_row(source_label(row["source"]), *values, f"{row['change']:+.4f}")
    weights = Table(
        "weight", "natural", "proposed", "best of each draw", "times read", box=None, pad_edge=False
    )
    for name, weight in result["weights"].items():
        low, high = result["weight_intervals"][name]
        interval = f"{low:.1%} to {high:.1%}"
        passes = f"{result['passes'][name]:.2g}"
        weights.add_row(name, f"{result['natural'][name]:.1%}", f"{weight:.1%}", interval, passes)
    print_tables(console, weights, losses)
    facts = {}
    if outcome := result.get("outcome"):
        mean = outcome[-1]
        inside = "inside" if mean["within"] else "outside"
        facts["outcome"] = f"mean {mean['outcome']:.4f}, {inside} the interval; forecast {mean['error']:+.2%}"
    facts["settings"] = " ".join(f"--set {shlex.quote(override)}" for override in result["overrides"])
    facts["or run"] = f"trainshed run {shlex.quote(relative(result['profile']))}"
    facts["page"] = relative(result["page"])
    print_facts(console, facts)
