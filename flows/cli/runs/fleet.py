"""`trainshed fleet`: write a page of all runs of a store."""

from __future__ import annotations

import argparse
from pathlib import Path

from flows.cli.exit_codes import DONE
from flows.ui.console import print_json, print_stderr, relative, waiting
from profiles.errors import ProfileError
from tasks.fleet.fleet import read_fleet
from tasks.fleet.page import key_figures, warning_texts, write_page
from tasks.store.store import Store


def run(options: argparse.Namespace) -> int:
    """Write the page and print totals and warnings. Raises ProfileError for an invalid store or output."""
    store = Store(options.store).existing()
    with waiting(lambda: "reading the runs"):
        fleet = read_fleet(store)
    if not fleet.runs:
        print_stderr(f"warning: no runs in {store.location}")
    try:
        page = write_page(fleet, Path(options.output))
    except OSError as error:
        raise ProfileError("--output", options.output, f"cannot be written: {error.strerror}") from error
    if options.json:
        runs, nodes = [run.to_json() for run in fleet.runs], [vars(node) for node in fleet.nodes]
        print_json({"runs": runs, "nodes": nodes, "device_seconds": fleet.use, "page": str(page)})
        return DONE
    for name, value in key_figures(fleet).items():
        print(f"{name:<16} {value}")
    for text in warning_texts(fleet):
        print_stderr(f"warning: {text}")
    print(f"page: {relative(str(page))}")
    return DONE
