"""`trainshed series` and `promote`: the rounds of a continual series, and which model is promoted."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from flows.cli.arguments import write_page
from flows.cli.exit_codes import DONE
from flows.ui.console import print_json, print_table, relative, table_console, waiting
from tasks.continual import page
from tasks.continual.gates import COLUMNS
from tasks.continual.rounds import promote_earlier, read_series, to_json
from tasks.store.store import Store, open_store

HEADINGS = ("round", "outcome", "new tokens", "replay", "time", "cost")  # losses have a table of their own


def run(options: argparse.Namespace) -> int:
    """Print the rounds and write the page. Raises ProfileError for an unknown series or a bad output."""
    with waiting(lambda: "reading the rounds"):
        found = read_series(Store(options.store).existing(), options.name)
    output = write_page(options.output, page.render(found))
    if options.json:
        print_json({**to_json(found), "page": output})
        return DONE
    console = table_console()
    print_table(console, *page.table(found.rounds, HEADINGS), left=2)
    losses = [
        ("" if number else each.name, *row.cells)
        for each in found.rounds
        for number, row in enumerate(each.rows)
    ]
    if losses:
        console.print()
        print_table(console, ("round", *COLUMNS), losses, left=2)
    for each in found.rounds:
        if each.reason:
            reason = f"\n{each.name} was not promoted: {each.reason}"
            console.print(reason, soft_wrap=not console.is_terminal, markup=False)
    console.print(f"\npromoted: {found.promoted.run}", soft_wrap=True, markup=False, highlight=False)
    console.print(f"page: {relative(output)}", soft_wrap=True, markup=False, highlight=False)
    return DONE


def promote(options: argparse.Namespace) -> int:
    """Promote the run. Raises ProfileError for a run that was never promoted, or is incomplete."""
    store = open_store(options.store, existing=True)
    before, after = promote_earlier(store, options.name, options.run)
    if options.json:
        print_json({"series": options.name, "before": before.run, "promoted": asdict(after)})
    elif before.run == after.run:
        print(f"{after.run} is already the promoted model of {options.name}")
    else:
        print(f"{after.run} replaces {before.run} as the promoted model of {options.name}")
        print(f"the next round is {options.name}-round-{after.next_round}")
    return DONE
