"""`trainshed ladder plan|run FILE`: plan the rungs of a ladder, or train them and forecast the target."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from flows.cli import run as run_command
from flows.cli.exit_codes import DONE
from flows.cli.plan_table import in_days
from flows.ui.console import relative
from modeling.planning.planner import Plan, plan
from modeling.scaling.rungs import Rung, target_of, warnings_of
from profiles.sections import ladder as ladders


def short(number: float) -> str:
    """5464 -> '5.46K', 2714304 -> '2.71M'."""
    for unit in ("", "K", "M", "G", "T", "P", "E"):
        if abs(number) < 999.5:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:,.3g}Z"


# Of the table, by the row's key: title, and how a value is shown. Those without any value are left out.
COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "parameters": ("parameters", short),
    "tokens": ("tokens", short),
    "steps": ("steps", str),
    "batch": ("batch", str),
    "learning_rate": ("rate", "{:.2g}".format),
    "devices": ("devices", str),
    "flops": ("FLOPs", short),
    "days": ("time", in_days),
    "price": ("price", "{:,.2f}".format),
}


def run(options: argparse.Namespace) -> int:
    """Plan or run a ladder; returns the exit code. Raises ProfileError for an invalid ladder."""
    if options.action == "plan":
        return _plan(options)
    ladder = ladders.load(options.file)
    profile = target_of(ladder).profile

    def start() -> dict[str, Any]:
        from flows.ladder import ladder as flow

        return flow(options.file, options.store, options.target)

    return run_command.run_flow(options, profile, ladder.name, start, _print_result)


def _plan(options: argparse.Namespace) -> int:
    from flows.ladder import load

    ladder, target, rungs, plans = load(options.file)
    rows = [_row(rung, planned) for rung, planned in zip(rungs, plans, strict=True)]
    total = _total(rows)
    goal = _row(target, plan(target.profile))
    warnings = warnings_of(target, rungs)
    if options.json:
        found = {"ladder": ladder.name, "rungs": rows, "total": total, "target": goal, "warnings": warnings}
        print(json.dumps(found, indent=1))
        return DONE
    shown = [*rows, total, goal]
    columns = [name for name in COLUMNS if any(row.get(name) is not None for row in shown)]
    table = Table(box=None, pad_edge=False, header_style="dim")
    prefix = f"{ladder.name}-"
    table.add_column(f"{prefix}…", no_wrap=True)
    for name in columns:
        table.add_column(COLUMNS[name][0], justify="right", no_wrap=True)
    for row in shown:
        cells = (COLUMNS[name][1](row[name]) if row.get(name) is not None else "" for name in columns)
        table.add_row(row["run"].removeprefix(prefix), *cells)
    console = Console(highlight=False)
    console.print(table)
    for warning in warnings:
        console.print(f"\nwarning: {warning}", style="yellow")
    return DONE


def _row(rung: Rung, planned: Plan) -> dict[str, Any]:
    """What the table says of a run; times and prices are None where the device's speed or price is unknown."""
    train = rung.profile.train
    return {
        "run": rung.name,
        "parameters": planned.parameters,
        "n": rung.n,
        "tokens": rung.tokens,
        "steps": train.steps,
        "batch": train.global_batch_size,
        "learning_rate": train.learning_rate,
        "devices": rung.profile.world_size,
        "flops": rung.flops,
        "days": planned.days,
        "price": planned.price,
    }


def _total(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums over the rungs; None where a rung's value is unknown."""
    found: dict[str, Any] = {"run": "all rungs"}
    for name in ("tokens", "flops", "days", "price"):
        values = [row[name] for row in rows]
        found[name] = None if None in values else sum(values)
    return found


def _print_result(console: Console, result: dict[str, Any]) -> None:
    """Print the forecast, the outcome if the target was trained, and the page."""
    low, high = result["interval"]
    facts = {
        "forecast": f"{result['loss']:.4f} for {result['target']['name']}",
        f"{result['share']:.0%} interval": f"{low:.4f} to {high:.4f}",
        "written": result["written"],
    }
    if outcome := result.get("outcome"):
        inside = "inside" if outcome["within"] else "outside"
        facts["outcome"] = (
            f"{outcome['outcome']:.4f}, {inside} the interval; forecast {outcome['error']:+.2%}"
        )
    for row in result["budgets"][1:]:
        if "gain" in row:
            facts["ten times more"] = f"compute buys {row['gain']:.4f} nats per token"
    facts["page"] = relative(result["page"])
    console.print()
    for name, value in facts.items():
        console.print(f"{name:<15}  {value}", soft_wrap=True, markup=False)
