"""Alternating rounds, tables, and command-line parsers."""

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from profiles.arguments import Parser, integer

WIDTH = 130  # columns of a table that is not printed to a terminal

T = TypeVar("T")


def make_parser(documentation: str | None, rounds: int | None = None, out: str | None = None) -> Parser:
    """Parser described by the benchmark's module docstring.

    Args:
        rounds: adds `--rounds` with this default.
        out: adds `--out`, by default a file of this name, for `results.Results`.
    """
    spec = sys.modules["__main__"].__spec__  # None if `main` is called from a script
    parser = Parser(
        prog=f"python -m {spec.name}" if spec else None,
        description=documentation,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if rounds:
        help_text = "number of times that each side runs, alternately"
        parser.add("--rounds N", help_text, type=integer(1), default=rounds)
    if out:
        path = Path(f"build/benchmarks/{out}.jsonl")
        help_text = "JSON Lines file to which each row is appended when it exists"
        parser.add("--out FILE", help_text, type=Path, default=path)
    return parser


def seconds(call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds that a call takes on a clock."""
    start = clock()
    call()
    return clock() - start


def alternate(
    sides: Mapping[str, Callable[[], T]],
    rounds: int,
    before_turn: Callable[[str], object] = lambda side: None,
    keep: Callable[[str, T], object] = lambda side, result: None,
) -> dict[str, list[T]]:
    """Run every side once per round, in turn, so that other load on the machine affects all sides equally.

    Args:
        keep: called with each result when it exists.

    Returns:
        Each side's results, one per round.
    """
    results: dict[str, list[T]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side, run in sides.items():
            before_turn(side)
            results[side].append(run())
            keep(side, results[side][-1])
    return results


def print_table(
    title: str, headings: Sequence[str], rows: Iterable[Sequence[Any]], caption: str = ""
) -> None:
    """Print a table; the first column is left-aligned, the others are right-aligned."""
    table = Table(title=title, caption=caption or None)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left", no_wrap=number > 1)
    for row in rows:
        table.add_row(*map(str, row))
    Console(width=None if sys.stdout.isatty() else WIDTH).print(table)
