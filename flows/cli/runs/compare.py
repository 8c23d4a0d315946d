"""`trainshed compare RUN [RUN ...]`: compare runs in a table and as an HTML page."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flows.cli.arguments import write_page
from flows.cli.exit_codes import DONE
from flows.ui.console import column_widths, parts_of, print_json, relative, table_console, waiting
from tasks.reporting import comparison_page
from tasks.store.store import Store

UNFOLDED = 16  # characters of a cell that is whole on any terminal


def run(options: argparse.Namespace) -> int:
    """Print the table and write the page. Raises ProfileError for an unknown run or an unwritable output."""
    with waiting(lambda: "reading the runs"):
        runs, histories = comparison_page.load_runs(Store(options.store), options.runs)
    page = write_page(options.output, comparison_page.render(runs, histories))
    if options.json:
        differences = comparison_page.profile_differences(runs)
        print_json({"runs": runs, "differences": differences, "page": page})
        return DONE
    console = table_console()
    _print(console, ("", *(run["run"] for run in runs)), comparison_page.table_rows(runs))
    console.print(f"\nloss curves: {relative(page)}", soft_wrap=True, markup=False)
    return DONE


def _print(console: Console, titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, on a narrow terminal in parts; only texts longer than UNFOLDED are folded."""
    name, *others = column_widths(titles, rows)
    widths = [name, *(min(UNFOLDED, width) for width in others)]
    for number, part in enumerate(parts_of(console, widths)):
        if number:
            console.print()
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
        for index in part:
            table.add_column(titles[index], overflow="fold", min_width=widths[index], no_wrap=not index)
        for row in rows:
            cells = (Text(row[index], "" if index else "dim") for index in part)
            table.add_row(*cells)
        console.print(table)
