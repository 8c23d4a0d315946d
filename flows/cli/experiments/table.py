"""Tables of experiments: planned runs with their compute, time, price and totals; and results."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from flows.cli.plan_table import in_days
from flows.ui.console import print_json, print_parts, table_console
from modeling.planning.planner import Plan
from modeling.scaling.planned_run import PlannedRun


def short(number: float) -> str:
    """5464 -> '5.46K', 2714304 -> '2.71M'."""
    for unit in ("", "K", "M", "G", "T", "P", "E"):
        if abs(number) < 999.5:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:,.3g}Z"


# Key of a row: title and formatter of its column. Columns without any value are left out.
COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "mixture": ("mixture, %", str),
    "from": ("from step", "{:,}".format),
    "parameters": ("parameters", short),
    "tokens": ("tokens", short),
    "steps": ("steps", "{:,}".format),
    "batch": ("batch", "{:,}".format),
    "learning_rate": ("lr", "{:.2g}".format),
    "devices": ("devices", "{:,}".format),
    "flops": ("FLOPs", short),
    "days": ("time", in_days),
    "price": ("price", "{:,.2f}".format),
}


def row_of(run: PlannedRun, planned: Plan) -> dict[str, Any]:
    """The row of a run, without the steps inherited from another; None where a speed or price is unknown."""
    train = run.profile.train
    return {
        "run": run.name,
        "parameters": planned.parameters,
        "n": run.n,
        "from": run.first_step or None,
        "tokens": round(run.tokens * run.share),
        "steps": train.steps,
        "batch": train.global_batch_size,
        "learning_rate": train.learning_rate,
        "devices": run.profile.world_size,
        "flops": run.flops,
        "days": None if planned.days is None else planned.days * run.share,
        "price": None if planned.price is None else planned.price * run.share,
    }


def total_of(rows: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    """Sums over runs; None where a run's value is unknown."""
    found: dict[str, Any] = {"run": name}
    for key in ("tokens", "flops", "days", "price"):
        values = [row[key] for row in rows]
        found[key] = None if None in values else sum(values)
    return found


def print_plan(
    options: argparse.Namespace,
    document: Mapping[str, Any],
    rows: Sequence[dict[str, Any]],
    experiment: str,
    *,
    without: Collection[str] = (),
    warnings: Sequence[str] = (),
) -> None:
    """Print the document with `--json`, else a table of the rows, named without the experiment's prefix.

    Args:
        without: columns to leave out.
        warnings: printed below the table.
    """
    if options.json:
        print_json(document)
        return
    columns = [key for key in COLUMNS if key not in without and any(row.get(key) is not None for row in rows)]
    prefix = f"{experiment}-"
    lines = []
    for row in rows:
        cells = (COLUMNS[key][1](row[key]) if row.get(key) is not None else "" for key in columns)
        lines.append([row["run"].removeprefix(prefix), *cells])
    console = table_console()
    print_parts(console, [f"{prefix}…", *(COLUMNS[key][0] for key in columns)], lines, left=1)
    for warning in warnings:
        console.print(f"\nwarning: {warning}", style="yellow")


def print_tables(console: Console, *tables: Table) -> None:
    """Print tables of results below each other; all columns but the first hold numbers."""
    for table in tables:
        table.header_style = "dim"
        for column in table.columns[1:]:
            column.justify = "right"
        console.print()
        console.print(table)
    console.print()
