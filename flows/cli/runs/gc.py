"""`trainshed gc`: show what no run of a store refers to, and remove it with `--yes`."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import asdict

from flows.cli.exit_codes import DONE
from flows.ui.console import print_json, print_table, table_console, waiting
from tasks.reporting.format import format_bytes
from tasks.store.garbage import find_garbage, remove
from tasks.store.store import Store


def run(options: argparse.Namespace) -> int:
    """List garbage; `--yes` removes it. Raises ProfileError for an invalid store or while a run is active."""
    store = Store(options.store).existing()
    with waiting(lambda: "looking for what no run refers to"):
        found, notes = find_garbage(store)
    if options.yes:
        with waiting(lambda: "removing it"):
            remove(store, found)
    if options.json:
        print_json({"garbage": [asdict(each) for each in found], "notes": notes, "removed": options.yes})
        return DONE
    console = table_console()
    if found:
        rows = [(each.what, each.name, format_bytes(each.bytes)) for each in found]
        print_table(console, ("what", "name", "size"), rows, left=2)
    for note in notes:
        console.print(f"note: {note}", markup=False)
    total = format_bytes(sum(each.bytes for each in found))
    if not found:
        empty = not store.backend.entries("runs")
        console.print(
            f"no runs in {store.location}" if empty else "nothing to remove: runs refer to everything"
        )
    elif options.yes:
        console.print(f"removed {total}")
    else:
        store_option = "" if options.store == "./store" else f" --store {shlex.quote(options.store)}"
        console.print(
            f"{total} can be removed: trainshed gc{store_option} --yes", soft_wrap=True, markup=False
        )
    return DONE
