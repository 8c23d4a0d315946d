"""`trainshed evaluate RUN[@STEP]`: evaluate checkpoints of a run, finished or still training."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console

from flows.cli.run import call_flow, run_flow
from flows.ui.console import print_parts, waiting
from modeling.start import without_garbage_collection
from profiles.check import with_value
from tasks.reporting.format import format_value
from tasks.store import runs
from tasks.store.store import open_store


def run(options: argparse.Namespace) -> int:
    """Evaluate; print the metrics by step. Raises ProfileError for an unknown run, checkpoint or override."""
    with without_garbage_collection(), waiting(lambda: "loading the evaluation"):
        from tasks.evaluation import request
        from tasks.evaluation.checkpoints import require_harness

    name, step = request.split(options.run)
    require_harness(options.tasks, options.include)
    store = open_store(options.store, options.work_dir, existing=True)
    folder = runs.fetch(store, name)
    request.require_checkpoint(store, name, step, follow=options.follow)
    # As the flow, instead of the run's cluster.work_dir.
    profile = with_value(
        request.load_profile(folder, options.overrides), "cluster.work_dir", options.work_dir
    )

    names = ("tasks", "include", "limit", "follow", "overrides", "store", "work_dir")
    given = {key: getattr(options, key) for key in names}
    start = call_flow("flows.evaluate:evaluate", options.run, **given)
    return run_flow(options, profile, f"{name}-evaluate", start, print_results)


def print_results(console: Console, rows: list[dict[str, Any]]) -> None:
    """Print a table: a row per step, a column per metric; standard errors are in the JSON and the report."""
    names = dict.fromkeys(name for row in rows for name in row if name != "step" and "_stderr" not in name)
    lines = []
    for row in rows:
        values = (format_value(row[name]) if name in row else "" for name in names)
        lines.append([f"{row['step']:,}", *values])
    console.print()
    titles = (name.replace("validation_loss", "validation loss") for name in names)
    print_parts(console, ("step", *titles), lines)
