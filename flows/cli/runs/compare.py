"""`trainshed compare RUN [RUN ...]`: compare runs in a table and as an HTML page."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.table import Table
from rich.text import Text

from flows.cli.exit_codes import DONE
from flows.ui.console import print_json, relative, table_console
from profiles.errors import ProfileError
from tasks.reporting import comparison_page
from tasks.store.store import Store


def run(options: argparse.Namespace) -> int:
    """Print the table and write the page. Raises ProfileError for an unknown run or an unwritable output."""
    runs, histories = comparison_page.load_runs(Store(options.store), options.runs)
    try:
        page = comparison_page.write_page(runs, histories, Path(options.output))
    except OSError as error:
        raise ProfileError("--output", options.output, f"cannot be written: {error.strerror}") from error
    if options.json:
        differences = comparison_page.profile_differences(runs)
        print_json({"runs": runs, "differences": differences, "page": str(page)})
        return DONE
    console = table_console()
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    for run in runs:
        table.add_column(run["run"], overflow="fold")
    for name, *cells in comparison_page.table_rows(runs):
        table.add_row(Text(name, "dim"), *map(Text, cells))
    console.print(table)
    console.print(f"\nloss curves: {relative(str(page))}", soft_wrap=True, markup=False)
    return DONE
