"""`trainshed chain`: train several profiles in one flow run, each from the previous export."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console

from flows.chained_runs import load_chain
from flows.cli.run import print_results, run_flow
from flows.ui.console import waiting
from modeling.start import without_garbage_collection


def run(options: argparse.Namespace) -> int:
    """Run the flow and print the results. Raises ProfileError for an invalid profile or store."""
    runs = load_chain(options.profiles, options.overrides, options.name or "")
    with without_garbage_collection(), waiting(lambda: f"planning {len(runs)} runs"):
        from flows.start_checks import check_plan

        for each in runs:
            check_plan(each.profile)

    def start() -> list[dict[str, Any]]:
        from flows.chain import chain

        given = options.profiles, options.overrides, options.name, options.store
        return chain(*given, replace=options.replace)

    return run_flow(options, runs[0].profile, "-".join(each.name for each in runs), start, _print)


def _print(console: Console, results: list[dict[str, Any]]) -> None:
    """Print the validation loss of each run, and the outputs of the last one."""
    console.print()
    width = max(len(result["run"]) for result in results)
    for result in results:
        before = result["before"] and f"{result['before']['validation_loss']:.4f} before, "
        line = f"{result['run']:<{width}}  validation loss {before or ''}{result['validation_loss']:.4f}"
        console.print(line + (" after" if before else ""), soft_wrap=True, markup=False)
    print_results(console, results[-1])
