"""`trainshed ladder plan|run FILE`: plan the rungs of a ladder, or train them and forecast the target."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console

from flows.cli import run as run_command
from flows.cli.exit_codes import DONE
from flows.cli.experiments.table import print_plan, row_of, total_of
from flows.experiments.plans import load_ladder, require_startable
from flows.ui.console import print_facts, relative
from modeling.planning.auto import resolve_auto
from modeling.planning.planner import plan
from modeling.scaling.rungs import warnings_of


def run(options: argparse.Namespace) -> int:
    """Plan or run a ladder; returns the exit code. Raises ProfileError for an invalid ladder."""
    if options.action == "plan":
        return _plan(options)
    ladder, target, rungs, _ = load_ladder(options.file)
    require_startable(rungs)

    def start() -> dict[str, Any]:
        from flows.experiments.ladder import ladder as flow

        return flow(options.file, options.store, options.target)

    return run_command.run_flow(options, target.profile, ladder.name, start, _print_result)


def _plan(options: argparse.Namespace) -> int:
    ladder, target, rungs, plans = load_ladder(options.file)
    rows = [row_of(rung, planned) for rung, planned in zip(rungs, plans, strict=True)]
    total = total_of(rows, "all rungs")
    goal = row_of(target, plan(resolve_auto(target.profile)))
    warnings = warnings_of(target, rungs)
    found = {"ladder": ladder.name, "rungs": rows, "total": total, "target": goal, "warnings": warnings}
    print_plan(options, found, [*rows, total, goal], ladder.name, warnings=warnings)
    return DONE


def _print_result(console: Console, result: dict[str, Any]) -> None:
    """Print the forecast, the outcome if the target was trained, and the path of the page."""
    low, high = result["interval"]
    facts = {
        "forecast": f"{result['loss']:.4f} for {result['target']['name']}",
        f"{result['share']:.0%} interval": f"{low:.4f} to {high:.4f}",
        "written": result["written"],
    }
    for name, row in result["metrics"].items():
        low, high = row["interval"]
        facts[name] = f"{row['value']:.4f}, {low:.4f} to {high:.4f}"
    if outcome := result.get("outcome"):
        inside = "inside" if outcome["within"] else "outside"
        facts["outcome"] = (
            f"{outcome['outcome']:.4f}, {inside} the interval; forecast {outcome['error']:+.2%}"
        )
    for row in result["budgets"][1:]:
        if "gain" in row:
            facts["10x compute"] = f"{-row['gain']:+.4f} nats per token"
    facts["page"] = relative(result["page"])
    console.print()
    print_facts(console, facts)
