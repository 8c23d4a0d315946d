"""Rows are run with a progress bar, their results shown as a table."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.rows import Plan, Result, Ring, Training
from benchmarks.sitting import ScriptError

WIDTH = 130  # of a table that goes into a file
STYLES = {"met": "green", "missed": "yellow", "failed": "bold red"}


def sit(rows: Sequence[Training | Ring], plan: Plan) -> list[Result]:
    """Run rows one after another, saying on standard error how far it is; a row that fails does not keep others from running."""
    results: list[Result] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("", total=sum(row.turns(plan) for row in rows))

        @contextmanager
        def turn(side: str) -> Iterator[None]:
            progress.update(bar, description=f"{rows[len(results)].name}: {side}")
            yield
            progress.advance(bar)

        for row in rows:
            try:
                results.append(row.run(plan, turn))
            except ScriptError as error:
                results.append(Result(row.name, row.title, row.against, row.target, failure=str(error)))
            progress.update(bar, completed=sum(row.turns(plan) for row in rows[: len(results)]))
    return results


def machine() -> dict[str, object]:
    """What figures depend on."""
    return {
        "processor": platform.machine(),
        "vector_units": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "load": os.getloadavg()[0],
    }


def show(results: Sequence[Result], how: str) -> None:
    """Print the table, and below it why rows failed."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    about = machine()
    table = Table(
        title=f"{about['cores']} cores ({about['vector_units']}), torch {about['torch']}; {how}",
        caption="ours, peer: ms a step; ratio: the peer's over ours (least and greatest of the rounds); in brackets what is due",
    )
    for heading, justify in {"work": "left", "against": "left", "ours": "right", "peer": "right"}.items():
        table.add_column(heading, justify=justify)
    for heading in ("ratio", "due", "of bound", "losses differ", "result"):
        table.add_column(heading, no_wrap=True)
    for result in results:
        table.add_row(*cells(result))
    console.print(table)
    for result in results:
        if result.failure:
            console.print(f"{result.name}: {result.failure}", style="red", markup=False)


def cells(result: Result) -> list[str]:
    """A result's line of the table."""
    status = f"[{STYLES[result.status]}]{result.status}[/]"
    if result.failure:
        return [result.title, result.against, "", "", "", f"{result.target:.2f}", "", "", status]
    bound = ""
    if result.of_bound is not None:
        bound = f"{result.of_bound:.2f} ({result.bound_target:.2f})"
    return [
        result.title,
        result.against,
        f"{1e3 * result.ours_seconds:,.0f}",
        f"{1e3 * result.peer_seconds:,.0f}",
        f"{result.ratio:.2f} ({min(result.ratios):.2f}–{max(result.ratios):.2f})",
        f"{result.target:.2f}",
        bound,
        f"{result.difference:.0e} ({result.tolerance:.0e})",
        status,
    ]
