"""`trainshed compare RUN RUN…`: what several runs came to, side by side, in the terminal and as one HTML page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flows.ui.console import from_here
from profiles.errors import ProfileError
from tasks.reporting import compare as comparison
from tasks.store.store import Store


def compare(named: Sequence[str], store: str, output: str, *, as_json: bool) -> int:
    """Compare runs of a store, given by name or folder; ProfileError where there is no such run."""
    runs = comparison.load_runs(Store(store), named)
    try:
        page = comparison.write_page(runs, Path(output))
    except OSError as error:
        raise ProfileError("--output", output, f"cannot be written: {error.strerror}") from error
    if as_json:
        differ = comparison.profile_differences(runs)
        print(json.dumps({"runs": runs, "differences": differ, "page": str(page)}, indent=1))
        return 0
    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("")
    for run in runs:
        table.add_column(run["run"], overflow="fold")
    for name, *cells in comparison.table_rows(runs):
        table.add_row(Text(name, "dim"), *map(Text, cells))
    console.print(table)
    console.print(f"\nloss curves: {from_here(str(page))}", soft_wrap=True, markup=False)
    return 0
