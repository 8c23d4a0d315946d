"""`trainshed runs`: list the runs of a store."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from flows.cli.exit_codes import DONE
from flows.ui.console import print_json, print_stderr
from tasks.fleet.page import format_cost
from tasks.fleet.runs import RunView, read_fleet
from tasks.reporting.format import format_age, format_bytes
from tasks.store.inventory import Run, list_runs
from tasks.store.store import Store

WIDTH = 200  # of a piped table


def run(options: argparse.Namespace) -> int:
    """Print the runs, the latest first. Raises ProfileError for an invalid store."""
    store = Store(options.store)
    found = sorted(list_runs(store), key=lambda each: -(each.changed or 0))
    views = {view.name: view for view in read_fleet(store).runs}
    if options.json:
        rows = [
            {**views[each.name].to_json(), **asdict(each)} if each.name in views else asdict(each)
            for each in found
        ]
        print_json(rows)
    elif found:
        _print(found, views)
    else:
        print_stderr(f"no runs in {options.store}")
    return DONE


def _print(found: list[Run], views: Mapping[str, RunView]) -> None:
    """Print a table, without the optional columns that are empty for all runs."""
    optional = {
        name: [_OPTIONAL[name](views[run.name]) if run.name in views else "" for run in found]
        for name in _OPTIONAL
    }
    optional = {name: values for name, values in optional.items() if any(values)}
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("run", "state"):
        table.add_column(title, no_wrap=True)
    for title in ("step", "loss", *optional, "age", "size"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("parent", no_wrap=True)
    for index, each in enumerate(found):
        table.add_row(
            each.name,
            _state(each, views.get(each.name)),
            _step(each, views.get(each.name)),
            f"{each.loss:.4f}" if each.loss is not None else "",
            *(values[index] for values in optional.values()),
            format_age(time.time() - each.changed) if each.changed else "",
            format_bytes(each.bytes),
            each.parent or "",
        )
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    console.print(table)


def _step(run: Run, view: RunView | None) -> str:
    """Step of the latest checkpoint, from which the run would resume; while running, of its latest loss."""
    step = max(run.step, view.step) if view and run.state == "running" else run.step
    return f"{step:,} of {run.steps:,}" if run.steps else f"{step:,}"


def _state(run: Run, view: RunView | None) -> str:
    """The state; queued or failed if the run's files show it."""
    finer = {"queued": "running", "failed": "stopped"}
    return view.state if view and finer.get(view.state) == run.state else run.state


_OPTIONAL: dict[str, Callable[[RunView], str]] = {
    "of plan": lambda view: f"{view.speed_of_plan:.0%}" if view.speed_of_plan else "",
    "goodput": lambda view: f"{view.use.goodput:.0%}" if view.use.goodput else "",
    "cost": lambda view: format_cost(view.cost) if view.cost is not None else "",
}
