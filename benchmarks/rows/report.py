"""Run comparisons with a progress bar and print their results as a table."""

import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.harness.processes import ScriptError
from benchmarks.harness.results import Results
from benchmarks.harness.timing import print_table
from benchmarks.rows.checks import CheckResult, DeviceChecks, MarkedTests
from benchmarks.rows.comparisons import Comparison, Result, Schedule

STYLES = {"met": "green", "passed": "green", "missed": "yellow", "incomplete": "yellow", "failed": "bold red"}
HEADINGS = ("work", "against", "ours", "peer", "ratio", "target", "of bound", "losses differ", "result")
CAPTION = (
    "ours, peer: ms per step; ratio: peer over ours (minimum–maximum of the rounds); target: of the ratio; in parentheses after "
    "other figures: their targets"
)


def run(
    rows: Sequence[Comparison | DeviceChecks | MarkedTests],
    schedule: Schedule,
    out: Path,
    minutes: float | None = None,
    card: str | None = None,
) -> list[Result | CheckResult]:
    """Run rows in order, with progress on standard error. A failed one does not stop the others.

    Args:
        out: JSON Lines file to which each result is appended when it exists, so that a run that is ended keeps them.
        minutes: no row but the first starts that would end later, if it took as long as the longest before; the results are then
            those of the first rows.
        card: as of `machine`.
    """
    results: list[Result | CheckResult] = []
    kept = Results(out)
    begun, longest = time.monotonic(), 0.0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("", total=sum(item.turns(schedule) for item in rows))
        for number, item in enumerate(rows):
            started = time.monotonic()
            if minutes is not None and started - begun + longest > 60 * minutes:
                break

            def before_turn(side: str, name: str = item.name) -> None:
                progress.update(bar, description=f"{name}: {side}", advance=1)

            try:
                results.append(item.run(schedule, before_turn))
            except ScriptError as error:
                named = item.name, item.title, item.against
                if isinstance(item, DeviceChecks | MarkedTests):
                    results.append(CheckResult(*named, "none ran", str(error)))
                else:
                    results.append(Result(*named, item.target, failure=str(error)))
            took = time.monotonic() - started
            longest = max(longest, took)
            progress.update(bar, completed=sum(item.turns(schedule) for item in rows[: number + 1]))
            progress.console.print(_line(results[-1]), markup=False, highlight=False, soft_wrap=True)
            kept.append({**results[-1].to_json(), "took": round(took), "machine": machine(card)})
    return results


def _line(result: Result | CheckResult) -> str:
    """A row's result in one line."""
    if isinstance(result, CheckResult):
        return f"{result.name}: {result.status}, {result.counted}"
    measured = "" if result.failure or result.lacks else f", ratio {result.ratio:.2f}"
    ours = f", {1e3 * statistics.median(result.ours):,.0f} ms" if result.ours else ""
    return f"{result.name}: {result.status}{measured}{ours}"


def machine(card: str | None = None) -> dict[str, object]:
    """The properties of this machine that the figures depend on, with its card, if any."""
    return {
        **({"card": card} if card else {}),
        "processor": platform.machine(),
        "vector_units": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "load": os.getloadavg()[0],
    }


def show(results: Sequence[Result | CheckResult], schedule: Schedule) -> None:
    """Print the table, and below it the reasons for failures."""
    this = machine()
    title = f"{this['cores']} cores ({this['vector_units']}), torch {this['torch']}; "
    title += (
        f"medians of {schedule.steps} steps in {schedule.rounds} rounds{', CPU time' * schedule.cpu_time}"
    )
    print_table(title, HEADINGS, map(_cells, results), CAPTION)
    for result in results:
        if result.failure:
            print(f"{result.name}: {result.failure}", file=sys.stderr)


def _cells(result: Result | CheckResult) -> list[str]:
    status = f"[{STYLES[result.status]}]{result.status}[/]"
    if isinstance(result, CheckResult):
        return [result.title, result.against, *[""] * 5, result.counted, status]
    ours, peer = (
        f"{1e3 * statistics.median(side):,.0f}" if side else "" for side in (result.ours, result.peer)
    )
    row, target = [result.title, result.against, ours, peer], f"{result.target:.2f}"
    if result.failure or result.lacks:
        return [*row, "", target, "", "", status]
    ratio = f"{result.ratio:.2f} ({min(result.ratios):.2f}–{max(result.ratios):.2f})"
    bound = f"{result.of_bound:.2f} ({result.bound_target:.2f})" if result.bound else ""
    return [*row, ratio, target, bound, f"{result.difference:.0e} ({result.tolerance:.0e})", status]
