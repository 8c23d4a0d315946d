"""`trainshed runs`, `fleet` and `gc`: list all runs, write a page of them, remove what none refers to."""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from flows.cli.arguments import write_page
from flows.cli.exit_codes import DONE
from flows.ui.console import print_json, print_stderr, print_table, relative, table_console, waiting
from modeling.start import without_garbage_collection
from tasks.fleet.fleet import ACTIVE, UNREADABLE, RunView, read_fleet
from tasks.fleet.page import format_cost, key_figures, render, warning_texts
from tasks.reporting.format import format_age, format_bytes, without_empty_columns
from tasks.store.garbage import find_garbage, remove
from tasks.store.run_folder import checkpoint_steps
from tasks.store.runs import files_by_run
from tasks.store.store import Store


def run(options: argparse.Namespace) -> int:
    """Print the runs, the latest first. Raises ProfileError for an invalid store."""
    store = Store(options.store).existing()
    # Garbage collection is a fifth of the time of 3,000 runs.
    with without_garbage_collection(), waiting(lambda: "reading the runs"):
        views = sorted(read_fleet(store).runs, key=lambda run: -run.summary.changed)
        stored = {name: _Files.of(files) for name, files in _stored(store, views).items()}
    for view in views:
        if view.summary.problem:
            print_stderr(f"trainshed: {view.summary.problem}")
    rows = [(run, stored.get(run.name, _Files())) for run in views]
    if options.json:
        print_json([run.to_json() | asdict(files) for run, files in rows])
    elif rows:
        _print(rows)
    else:
        print_stderr(f"no runs in {store.location}")
    return DONE


def _stored(store: Store, runs: Sequence[RunView]) -> dict[str, dict[str, int]]:
    """Files of each run that can be read, with their sizes."""
    try:
        return files_by_run(store)
    except OSError:
        if not any(run.state == UNREADABLE for run in runs):
            raise
    return {run.name: store.backend.files(f"runs/{run.name}") for run in runs if run.state != UNREADABLE}


@dataclass(frozen=True)
class _Files:
    """Size and latest checkpoint of a run folder in the store."""

    checkpoint: int = 0  # step of its latest checkpoint; 0 without one
    bytes: int = 0

    @classmethod
    def of(cls, files: Mapping[str, int]) -> _Files:
        """What is shown of a run's files, given their sizes by name."""
        return cls(max(checkpoint_steps(files), default=0), sum(files.values()))


def _print(rows: Sequence[tuple[RunView, _Files]]) -> None:
    """Print a table, without the columns that are empty for all runs."""
    lines = []
    for run, files in rows:
        summary = run.summary
        loss = summary.last["loss"] if summary.last else None
        line = [run.name, run.shown_state, _step(run, files), f"{loss:.4f}" if loss is not None else ""]
        line += [text(run) for text in _OPTIONAL.values()]
        line += [format_age(time.time() - summary.changed) if summary.changed else ""]
        lines.append([*line, format_bytes(files.bytes), summary.parent or ""])
    titles = ("run", "state", "step", "loss", *_OPTIONAL, "age", "size", "parent")
    shown, lines = without_empty_columns(titles, lines)
    left = [index for index, title in enumerate(shown) if title in ("run", "state", "parent")]
    print_table(table_console(), shown, lines, left=left, folds=True)


def _step(run: RunView, files: _Files) -> str:
    """Step of the latest checkpoint, from which the run would resume; while running, of its latest loss."""
    step = max(run.step, files.checkpoint) if run.state in ACTIVE else files.checkpoint
    return f"{step:,} of {run.summary.steps:,}" if run.summary.steps else f"{step:,}"


_OPTIONAL: dict[str, Callable[[RunView], str]] = {
    "of plan": lambda view: f"{view.speed_of_plan:.0%}" if view.speed_of_plan else "",
    "goodput": lambda view: f"{view.use.goodput:.0%}" if view.use.goodput else "",
    "cost": lambda view: format_cost(view.cost) if view.cost is not None else "",
}


def fleet(options: argparse.Namespace) -> int:
    """Write the page and print totals and warnings. Raises ProfileError for an invalid store or output."""
    store = Store(options.store).existing()
    with waiting(lambda: "reading the runs"):
        overview = read_fleet(store)
    if not overview.runs:
        print_stderr(f"warning: no runs in {store.location}")
    page = write_page(options.output, render(overview))
    if options.json:
        runs, nodes = [run.to_json() for run in overview.runs], [vars(node) for node in overview.nodes]
        print_json({"runs": runs, "nodes": nodes, "device_seconds": overview.use, "page": page})
        return DONE
    for name, value in key_figures(overview).items():
        print(f"{name:<16} {value}")
    for text in warning_texts(overview):
        print_stderr(f"warning: {text}")
    print(f"page: {relative(page)}")
    return DONE


def gc(options: argparse.Namespace) -> int:
    """List garbage; `--yes` removes it. Raises ProfileError for an invalid store or while a run is active."""
    store = Store(options.store).existing()
    with waiting(lambda: "looking for what no run refers to"):
        garbage, notes = find_garbage(store)
    if options.yes:
        with waiting(lambda: "removing it"):
            remove(store, garbage)
    if options.json:
        print_json({"garbage": [asdict(each) for each in garbage], "notes": notes, "removed": options.yes})
        return DONE
    console = table_console()
    if garbage:
        rows = [(each.what, each.name, format_bytes(each.bytes)) for each in garbage]
        print_table(console, ("what", "name", "size"), rows, left=2)
    for note in notes:
        console.print(f"note: {note}", markup=False)
    total = format_bytes(sum(each.bytes for each in garbage))
    if not garbage:
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
