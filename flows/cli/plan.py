"""`trainshed plan`: plan a run, search for topologies, or compare with an existing run."""

from __future__ import annotations

import argparse

from flows.ui.console import waiting
from modeling.start import without_garbage_collection
from profiles import resolve
from profiles.errors import ProfileError


def run(options: argparse.Namespace) -> int:
    """Load and check the profile before the planner's module imports torch; returns the exit code."""
    if options.search and options.changes:
        raise ProfileError("--changes", options.changes, "cannot be combined with --search")
    profile = resolve.load(options.profile, options.overrides)
    loading = waiting(lambda: "loading the planner")
    if options.search:
        with without_garbage_collection(), loading:
            from flows.cli.search import show_search

        return show_search(profile, options.profile, options.overrides, as_json=options.json)
    resolve.check(profile)
    if options.changes:
        with without_garbage_collection(), loading:
            from flows.cli.rerun_table import show_rerun
            from flows.start_checks import RunCommand

        name = None if options.changes == profile.name else options.changes
        command = RunCommand(options.profile, options.overrides, name, options.store)
        return show_rerun(profile, command, options.changes, as_json=options.json)
    with without_garbage_collection(), loading:
        from flows.cli.plan_table import show_plan

    return show_plan(profile, as_json=options.json)
