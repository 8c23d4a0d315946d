"""`trainshed promote NAME RUN`: make an earlier round's model the promoted one of its series."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from flows.cli.exit_codes import DONE
from flows.ui.console import print_json
from tasks.continual.promotion import promote_earlier
from tasks.store.store import open_store


def run(options: argparse.Namespace) -> int:
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
