"""`trainshed fork RUN[@STEP] NEW`: start a new run from another run's checkpoint."""

from __future__ import annotations

import argparse

from flows.cli import run as run_command
from profiles.files import run_files, yaml_text
from tasks.fork import decay_overrides, find_parent, parent_profile
from tasks.store import runs
from tasks.store.store import Store, open_store


def run(options: argparse.Namespace) -> int:
    """Run the flow of the new run. Raises ProfileError for an unknown run, step, name or setting."""
    store = open_store(options.store, options.work_dir or _work_dir(options), existing=True)
    parent = find_parent(store, options.parent, options.name)
    options.profile = str(parent_profile(store, parent, options.name))
    if options.work_dir:  # otherwise, the new run uses its parent's
        options.overrides = [f"cluster.work_dir={options.work_dir}", *options.overrides]
    if options.decay:
        options.overrides = [*decay_overrides(options.profile, parent, options.decay), *options.overrides]
    options.fork, options.replace = f"{parent.run}@{parent.step}", False
    return run_command.run(options)


def _work_dir(options: argparse.Namespace) -> str:
    """The parent's cluster.work_dir, which the new run uses too."""
    name = options.parent.partition("@")[0]
    stored = runs.existing_run(Store(options.store).existing(), "fork", name).read(run_files.PROFILE)
    try:
        work_dir = yaml_text.parse(stored or b"")["cluster"]["work_dir"]
    except (ValueError, LookupError, TypeError):  # without one; or corrupted, and rejected when it is loaded
        return "store"
    return work_dir if isinstance(work_dir, str) else "store"
