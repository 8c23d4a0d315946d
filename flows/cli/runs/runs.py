"""`trainshed runs`: list the runs of a store."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from flows.cli.exit_codes import DONE
from flows.ui.console import print_json, print_stderr, print_table, table_console, waiting
from modeling.start import without_garbage_collection
from tasks.fleet.fleet import ACTIVE, UNREADABLE, RunView, read_fleet
from tasks.fleet.page import format_cost
from tasks.reporting.format import format_age, format_bytes
from tasks.store.run_folder import checkpoint_steps
from tasks.store.runs import files_by_run
from tasks.store.store import Store


def run(options: argparse.Namespace) -> int:
    """Print the runs, the latest first. Raises ProfileError for an invalid store."""
    store = Store(options.store).existing()
    # Garbage collection is a fifth of the time of 3,000 runs.
    with without_garbage_collection(), waiting(lambda: "reading the runs"):
        found = sorted(read_fleet(store).runs, key=lambda run: -run.summary.changed)
        stored = {name: _Files.of(files) for name, files in _stored(store, found).items()}
    for view in found:
        if view.summary.problem:
            print_stderr(f"trainshed: {view.summary.problem}")
    rows = [(run, stored.get(run.name, _Files())) for run in found]
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
    """Print a table, without the optional columns that are empty for all runs."""
    optional = {name: [text(run) for run, _ in rows] for name, text in _OPTIONAL.items()}
    optional = {name: values for name, values in optional.items() if any(values)}
    titles = ("run", "state", "step", "loss", *optional, "age", "size", "parent")
    lines = []
    for index, (run, files) in enumerate(rows):
        summary = run.summary
        loss = summary.last["loss"] if summary.last else None
        line = [run.name, run.shown_state, _step(run, files), f"{loss:.4f}" if loss is not None else ""]
        line += [values[index] for values in optional.values()]
        line += [format_age(time.time() - summary.changed) if summary.changed else ""]
        lines.append([*line, format_bytes(files.bytes), summary.parent or ""])
    print_table(table_console(), titles, lines, left=2, last_left=True)


def _step(run: RunView, files: _Files) -> str:
    """Step of the latest checkpoint, from which the run would resume; while running, of its latest loss."""
    step = max(run.step, files.checkpoint) if run.state in ACTIVE else files.checkpoint
    return f"{step:,} of {run.summary.steps:,}" if run.summary.steps else f"{step:,}"


_OPTIONAL: dict[str, Callable[[RunView], str]] = {
    "of plan": lambda view: f"{view.speed_of_plan:.0%}" if view.speed_of_plan else "",
    "goodput": lambda view: f"{view.use.goodput:.0%}" if view.use.goodput else "",
    "cost": lambda view: format_cost(view.cost) if view.cost is not None else "",
}
