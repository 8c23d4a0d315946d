"""`trainshed branches plan|run FILE`: plan a trunk and branches, or train, average and compare them."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console

from flows.cli import run as run_command
from flows.cli.exit_codes import DONE
from flows.cli.experiments.table import print_plan, row_of, total_of
from flows.experiments.plans import load_branches, require_startable
from flows.ui.console import relative
from profiles.experiments.branches import Branches
from profiles.experiments.load import load_experiment
from tasks.experiments.branches import trunk_of
from tasks.store.store import Store

SAME = ("parameters", "batch", "learning_rate")  # for all runs, so the table omits them


def run(options: argparse.Namespace) -> int:
    """Plan or run the branches; returns the exit code. Raises ProfileError for an invalid file."""
    if options.action == "plan":
        return _plan(options)
    first = trunk_of(load_experiment(Branches, options.file)).profile
    store = Store(options.store, first.cluster.work_dir or "store")
    described, trunk, found, _ = load_branches(options.file, store)
    require_startable([trunk, *found])

    def start() -> dict[str, Any]:
        from flows.experiments.branches import branches as flow

        return flow(options.file, options.store)

    return run_command.run_flow(options, trunk.profile, described.name, start, _print_result)


def _plan(options: argparse.Namespace) -> int:
    described, trunk, branches, plans = load_branches(options.file)
    runs = [trunk, *branches]
    rows = [row_of(run, planned) for run, planned in zip(runs, plans, strict=True)]
    total = total_of(rows, "all runs")
    scratch = sum(run.flops / run.share for run in branches)
    found = {"branches": described.name, "runs": rows, "total": total, "from_scratch_flops": scratch}
    print_plan(options, found, [*rows, total], described.name, without=SAME)
    if not options.json:
        print(f"\n{total['flops'] / scratch:.0%} of the compute of training each length from scratch")
    return DONE


def _print_result(console: Console, result: dict[str, Any]) -> None:
    """Print the loss of each length and each average, and the paths of averaged models and the page."""
    console.print()
    names = [row["run"] for row in result["runs"]] + [row["average"] for row in result["averages"]]
    width = max(map(len, names))
    for row in result["runs"]:
        console.print(f"{row['run']:<{width}}  {row['steps']:>8,} steps  loss {row['validation_loss']:.4f}")
    for row in result["averages"]:
        count = len(row["members"])
        console.print(f"{row['average']:<{width}}  {count:>2} checkpoints  loss {row['validation_loss']:.4f}")
        console.print(f"  model: {relative(row['model'])}", soft_wrap=True, markup=False)
    console.print(f"\npage: {relative(result['page'])}", soft_wrap=True, markup=False)
