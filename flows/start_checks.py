"""Checks of a run that need neither Prefect nor its steps: devices, memory, and the runs of the store.

The command makes them before it imports Prefect or starts a server, and the flow again, since a worker may have started it.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from modeling.planning import planner
from modeling.planning.auto import resolve_auto
from profiles import resolve
from profiles.check import with_value
from profiles.errors import ProfileError
from profiles.files import run_files, state_files
from profiles.local_paths import RUN, local_path
from profiles.schema import Profile
from tasks.fork import find_parent, require_forkable, require_new_name
from tasks.inputs import locate_export, locate_runs
from tasks.steps.tokenizer import check_folder
from tasks.store import runs
from tasks.store.run_folder import Parent
from tasks.store.store import Store


@dataclass(frozen=True)
class RunCommand:
    """The `trainshed run`, `chain` or `fork` command that is equivalent to a flow run's parameters."""

    profile: str  # of the run
    overrides: Sequence[str]
    name: str | None  # of the run, or the prefix of a chain's names
    store: str
    chain: Sequence[str] = ()  # the profiles of the chain; empty for `trainshed run`
    fork: str = ""  # RUN or RUN@STEP of `trainshed fork`

    def alternatives(self, conflict: runs.RunExists, name: str) -> list[tuple[str, str]]:
        """(description, command) pairs that avoid a conflict with an existing run of different mathematics."""
        settings = [part for override in self.overrides for part in ("--set", override)]
        settings += ["--store", self.store] if self.store != "./store" else []
        if self.fork:  # `trainshed fork` replaces no run
            command = ["trainshed", "fork", self.fork, f"{name}-2", *settings]
            return [("fork under another name", shlex.join(command))]
        begin = ["chain", *self.chain] if self.chain else ["run", self.profile]
        same, other, does = ["trainshed", *begin, *settings], f"{name}-2", "train under another name"
        named = ["--name", self.name] if self.name else []
        if self.chain:
            other, does = f"{self.name}-2" if self.name else "second", "train under other names"
        found = [([*same, "--name", other], does)]
        if conflict.forkable and not self.chain:  # a chain cannot start from a fork
            given = {override.partition("=")[0].strip() for override in self.overrides}
            more = [each for each in conflict.settings if each.partition("=")[0] not in given]
            more = [part for override in more for part in ("--set", override)]
            command = ["trainshed", "fork", f"{name}@{conflict.step}", other, *more, *settings]
            found.append((command, f"continue from its step {conflict.step:,}"))
        found.append(([*same, *named, "--replace"], f"move it to {name}~N and start over"))
        return [(does, shlex.join(command)) for command, does in found]


@contextmanager
def suggest_commands(command: RunCommand | None, name: str) -> Iterator[None]:
    """Add the commands that avoid the conflict to a RunExists raised in the block."""
    try:
        yield
    except runs.RunExists as conflict:
        conflict.commands = command.alternatives(conflict, name) if command else ()
        raise


def overrides_from(source: str, store: Store) -> list[str]:
    """Overrides with which a profile starts from a model: its weights, tokenizer and architecture.

    Args:
        source: run:NAME, an exported run of the store; a folder, or a hub repository.

    Raises:
        ProfileError: the store has no such run with an export.
    """
    config = source
    if source.startswith(RUN):
        locate_export(store.existing(), "--from", source)
        config = str(store.work_dir / "runs" / source.removeprefix(RUN) / run_files.EXPORT)
    elif "/" not in source and not state_files.exists(local_path(source)):
        raise ProfileError("--from", source, "is neither run:NAME, a folder nor a repository", [RUN + source])
    named, settings = json.dumps(source), json.dumps(config)  # also YAML
    return [f"init={{from: {named}}}", f"tokenizer.source={named}", f"model.config={settings}"]


def load(profile: str, overrides: Sequence[str], name: str | None) -> Profile:
    """Resolve a profile. Raises ProfileError for one that cannot start here."""
    run = resolve.load(profile, overrides, name)
    resolve.check(run)
    resolve.check_start(run)
    return on_devices(run)


def on_devices(run: Profile) -> Profile:
    """A profile whose `auto` values are resolved. Raises ProfileError if this machine lacks its devices."""
    planner.require_devices(run)  # first: without a GPU, planning asks which one to plan for
    return resolve_auto(run)


def check_plan(profile: Profile) -> Profile:
    """As `on_devices`; also raises ProfileError for a run that does not fit in its devices' memory."""
    run = on_devices(profile)
    planner.require_fit(run, planner.plan(run))
    return run


def check_run(profile: Profile, command: RunCommand, *, replace: bool = False) -> None:
    """Check a valid profile of `trainshed run` or `fork` as the flow does before its first step.

    Raises:
        ProfileError: the devices are missing or too small, the store lacks a run that it needs, or a tokenizer in a folder
            does not fit the model and the data.
        RunExists: the name belongs to another run.
    """
    run = check_plan(profile)
    store = Store(command.store, run.cluster.work_dir or "store")
    run, _ = admit(store, run, command, replace=replace)
    if not store.run_folder(run.name).read(run_files.LOCKFILE):  # it has its inputs
        check_folder(run)


def admit(
    store: Store, profile: Profile, command: RunCommand, *, replace: bool
) -> tuple[Profile, Parent | None]:
    """The profile with which a run starts in a store, and the checkpoint that it is forked from.

    Raises:
        ProfileError: the store lacks a run that it needs, or it cannot be forked from that checkpoint.
        RunExists: the name belongs to another run.
    """
    run, parent = locate_runs(profile, store), None
    if not replace:
        run = runs.recorded_compilation(store, run)
    if command.fork:
        parent = find_parent(store, command.fork, run.name)
        run = with_value(with_value(run, "checkpoint.resume", "newest"), "checkpoint.weights_only", False)
        require_forkable(store, parent, run, replace=replace)
        if not replace:
            require_new_name(store, parent, run.name)
    if not replace:
        with suggest_commands(command, run.name):
            runs.check_name(store, run)
    return run, parent
