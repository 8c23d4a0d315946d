"""`trainshed runs`: list the runs of a store."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from flows.cli.exit_codes import DONE
from flows.ui.console import print_stderr
from tasks.reporting.format import format_age, format_bytes
from tasks.store.inventory import Run, list_runs
from tasks.store.store import Store


def run(options: argparse.Namespace) -> int:
    """Print the runs, the latest first. Raises ProfileError for an invalid store."""
    found = sorted(list_runs(Store(options.store)), key=lambda each: -(each.changed or 0))
    if options.json:
        print(json.dumps([asdict(each) for each in found], indent=1))
    elif found:
        _print(found)
    else:
        print_stderr(f"no runs in {options.store}")
    return DONE


def _print(found: list[Run]) -> None:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("run", "state"):
        table.add_column(title, no_wrap=True)
    for title in ("step", "loss", "age", "size"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("parent", no_wrap=True)
    for each in found:
        table.add_row(
            each.name,
            each.state,
            f"{each.step:,} of {each.steps:,}" if each.steps else f"{each.step:,}",
            f"{each.loss:.4f}" if each.loss is not None else "",
            format_age(time.time() - each.changed) if each.changed else "",
            format_bytes(each.bytes),
            each.parent or "",
        )
    Console(highlight=False).print(table)
