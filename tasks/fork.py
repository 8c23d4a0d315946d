"""Forks: runs that start from another run's checkpoint; what is copied, refused and warned of.

With the checkpoint come the optimizer state, the data position and the metrics.

The checkpoint is copied, by hard links where the file system has them, and the new run resumes from it as from its own. Its
run.json names the parent, which may be removed afterwards. A parent that still trains removes old checkpoints, so the copy is
made first, in `checkpoints.partial/`, and moved once the new run's inputs are known.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path

from modeling.data.sample_order import quotas
from modeling.supervision.time_account import TOTALS
from modeling.training.learning_rate import learning_rate
from parallel.checkpoint.locations import MARKER, QUARANTINE
from profiles import resolve
from profiles.errors import ProfileError
from profiles.files import run_files, state_files
from profiles.files.jsonl import is_metrics
from profiles.schema import Profile, Train
from profiles.validation_errors import INVALID_NAME
from tasks.keys import POSITION
from tasks.store import ledger, runs
from tasks.store.run_folder import Parent, RunFolder
from tasks.store.store import Store

log = logging.getLogger(__name__)

HELD = f"{run_files.CHECKPOINTS}.partial"  # a parent's checkpoint, until the new run is opened; never synced
RATE_RISE = 1.05  # factor by which a fork may raise the learning rate without a warning
HELD_PARENT = f"{HELD}/parent.json"  # written once the copy is complete


def find_parent(store: Store, text: str, child: str) -> Parent:
    """Parent of the run `child`, named by RUN or RUN@STEP.

    Without STEP, it is the checkpoint that `child` was already forked from, else the parent's latest. So the same command resumes
    a fork even if the parent has saved or removed checkpoints since, or was itself removed or replaced.

    Raises ProfileError if there is no such run or checkpoint.
    """
    name, _, wanted = text.partition("@")
    if child == name:
        raise ProfileError("name", child, "is the parent's own; a fork is a new run", [f"{name}-2"])
    run = runs.existing_run(store, "fork", name)
    identity = run.stored_identity
    try:
        forked = store.run_folder(child)
    except ValueError as error:
        raise ProfileError("name", child, INVALID_NAME) from error
    known = forked.parent or _held_parent(forked)
    if known and known.run == name and wanted in ("", str(known.step)):
        if known.identity == identity:
            return known
        # Once opened, with a checkpoint of its own, it resumes without its parent.
        if forked.parent == known and (not _needs_checkpoint(forked) or _held_parent(forked) == known):
            log.info("run %s was removed or replaced; %s resumes from its own checkpoint", name, child)
            return known
    if identity is None:
        raise runs.unknown_run(store, "fork", name)
    steps = run.checkpoint_steps()
    if not steps:
        raise ProfileError("fork", text, f"run {name} has no complete checkpoint to start from")
    if not wanted:
        return Parent(name, identity, steps[-1])
    if not wanted.isdecimal() or int(wanted) not in steps:
        reason = f"run {name} has no complete checkpoint of step {wanted}"
        nearest = _nearest(run, int(wanted) if wanted.isdecimal() else steps[-1])
        raise ProfileError("fork", text, reason, nearest)
    return Parent(name, identity, int(wanted))


def parent_profile(store: Store, parent: Parent, child: str) -> Path:
    """The profile.yaml of a parent on this machine; the fork's own if the parent was removed or replaced."""
    is_there = store.run_folder(parent.run).stored_identity == parent.identity
    return runs.fetch(store, parent.run if is_there else child) / run_files.PROFILE


def decay_overrides(profile: str | Path, parent: Parent, steps: int) -> list[str]:
    """Overrides for a fork that decays the learning rate of a parent's profile.yaml to 0 in `steps` steps."""
    train = resolve.load(str(profile)).train
    return decay_settings(train, parent.run, parent.step, steps, key="--decay")


def decay_settings(train: Train, run: str, step: int, steps: int, key: str = "decay") -> list[str]:
    """Overrides for a fork's linear decay from the parent's learning rate at `step` to 0 in `steps` steps.

    The fork is a branch of a trunk with warm-up and a constant rate (WSD: arXiv 2404.06395, 2405.18392). The parent's steps
    count as the branch's own, so its result equals that of a run with this schedule from the start.

    Args:
        train: the parent's section `train`.
        run: the parent's name.
        key: key that an error names.

    Raises:
        ProfileError: the parent's learning rate is not constant at that step.
    """
    if step < train.warmup_steps:
        reason = f"step {step:,} is within the warm-up of {run}, which ends at step {train.warmup_steps:,}"
        raise ProfileError(key, steps, f"{reason}; fork from a later step")
    if learning_rate(train, step) != train.learning_rate:
        reason = f"the learning rate of {run} has begun to decay before step {step:,}"
        raise ProfileError(
            key, steps, f"{reason}; fork from an earlier step, or from a run with train.schedule = constant"
        )
    settings = {
        "steps": step + steps,
        "epochs": "null",
        "constant_steps": step - train.warmup_steps,
        "minimum_rate_steps": 0,
        "minimum_learning_rate": 0.0,
        "schedule": "linear",
    }
    return [f"train.{name}={value}" for name, value in settings.items()]


def require_forkable(store: Store, parent: Parent, profile: Profile, *, replace: bool = False) -> None:
    """Raise ProfileError if a run of this profile cannot start from the parent's checkpoint.

    Args:
        replace: start over, even if the fork has a checkpoint from which it could resume.
    """
    existing = resolve.load(str(parent_profile(store, parent, profile.name)))
    if existing.model != profile.model:
        reason = f"differs from the model of {parent.run}; to start from its weights alone, set init.from=run:{parent.run}"
        raise ProfileError("model", None, reason)
    _require_same_updates(existing, profile, parent)
    for name in POSITION:
        theirs, ours = getattr(existing.train, name), getattr(profile.train, name)
        if theirs != ours:
            reason = f"a fork continues at the data position of {parent.run}, which depends on its {name}"
            raise ProfileError(f"train.{name}", ours, reason, [theirs])
    if profile.train.steps is not None and profile.train.steps <= parent.step:
        reason = f"the fork starts at step {parent.step:,}"
        raise ProfileError("train.steps", profile.train.steps, reason, [parent.step + 1])
    if replace or _needs_checkpoint(store.run_folder(profile.name)):
        require_same_mixture(existing, profile, parent.run, parent.step)


def _require_same_updates(existing: Profile, profile: Profile, parent: Parent) -> None:
    """Raise ProfileError if the parent's checkpoint has other trained tensors than a run of this profile."""
    theirs, ours = existing.lora, profile.lora
    name = "rank" if theirs.rank != ours.rank else "targets"
    if name == "targets" and (not ours.rank or {*theirs.targets} == {*ours.targets}):
        return
    old, new = (getattr(lora, name) or "null" for lora in (theirs, ours))
    reason = f"a fork loads the tensors that {parent.run} trained, which depend on its lora.{name}; to start from its weights "
    reason += f"alone, set init.from=run:{parent.run}"
    raise ProfileError(f"lora.{name}", new, reason, [old])


def require_same_mixture(parent: Profile, profile: Profile, run: str, step: int) -> None:
    """Raise ProfileError if a source of both profiles has another share of the samples before a fork.

    Where a fork continues to read a source depends on its share of all earlier samples.

    Args:
        parent: profile of the run named `run`.
    """
    theirs, ours = _phases(parent, step), _phases(profile, step)
    if not theirs or not ours:
        return
    old, new = (next(iter(phases.values())).keys() for phases in (theirs, ours))
    if all(_shares(theirs, source) == _shares(ours, source) for source in old & new):
        return
    phases = {first: [weights.get(source, 0.0) for source in new] for first, weights in theirs.items()}
    phases[step + 1] = [*[*ours.values()][-1].values()]
    phases |= {each.step: each.weights for each in profile.data.schedule if each.step > step}
    schedule = [{"step": first, "weights": weights} for first, weights in phases.items()]
    reason = f"{run} drew other shares of its sources up to step {step:,}, so a fork would repeat and leave out text"
    reason += "; keep all of its sources with their weights, and change the weights after that step"
    raise ProfileError("data.schedule", None, reason, [schedule] if old <= new else [])


def _phases(profile: Profile, step: int) -> dict[int, dict[str, float]]:
    """Weights by source of the mixture's phases up to a step, by first step; empty without weights."""
    sources = [source for source in profile.data.sources if source.use != "validation"]
    base = [source.weight for source in sources if source.weight is not None]
    if len(sources) <= 1:
        base = [1.0]
    elif len(base) < len(sources):
        return {}
    names = [source.model_dump_json(exclude={"weight"}) for source in sources]
    phases = {1: base} | {each.step: each.weights for each in profile.data.schedule if each.step <= step}
    return {first: dict(zip(names, weights, strict=True)) for first, weights in phases.items()}


def _shares(phases: Mapping[int, Mapping[str, float]], source: str) -> list[tuple[int, Fraction]]:
    """The shares of the samples that a source has, each with the first step from which it applies."""
    shares: list[tuple[int, Fraction]] = []
    for first, weights in phases.items():
        counts = dict(zip(weights, quotas([*weights.values()]), strict=True))
        share = Fraction(counts[source], sum(counts.values()))
        if not shares or shares[-1][1] != share:
            shares.append((first, share))
    return shares


def require_new_name(store: Store, parent: Parent, name: str) -> None:
    """Raise ProfileError if a run of this name exists and was not forked from this parent."""
    run = store.run_folder(name)
    if run.stored_identity is None or (run.parent and run.parent.run == parent.run):
        return
    reason = f"a run of this name exists, and was not forked from {parent.run}"
    names = {each.split("/")[0] for each in store.backend.entries("runs")}
    free = next(f"{name}-{number}" for number in itertools.count(2) if f"{name}-{number}" not in names)
    raise ProfileError("name", name, reason, [free])


def rate_warnings(store: Store, parent: Parent, profile: Profile) -> list[str]:
    """A warning if a new fork begins at a higher learning rate than its parent ended with; else nothing.

    A longer run stretches the decay, so a fork from the end of a run returns to a rate from the middle of its schedule.
    """
    if not _needs_checkpoint(store.run_folder(profile.name)):
        return []  # it resumes
    theirs, ours = resolve.load(str(parent_profile(store, parent, profile.name))).train, profile.train
    last, first = learning_rate(theirs, parent.step), learning_rate(ours, parent.step + 1)
    following = learning_rate(theirs, min(parent.step + 1, theirs.last_step))  # higher during the warm-up
    if first <= RATE_RISE * max(last, following):
        return []
    return [
        f"the learning rate rises from {last:.2e}, at step {parent.step:,} of {parent.run}, to {first:.2e} at step "
        f"{parent.step + 1:,}, as the fork's schedule ends at step {ours.steps:,}; to continue at the parent's rate, set "
        f"train.schedule=constant and train.learning_rate={last:g}"
    ]


def hold_checkpoint(store: Store, parent: Parent, name: str) -> None:
    """Copy a parent's checkpoint and metrics for a run without them, before the parent removes it.

    Raises ProfileError if the parent has removed it, or was itself removed or replaced.
    """
    source, run = store.run_folder(parent.run), store.run_folder(name)
    if not _needs_checkpoint(run) or _held_parent(run) == parent:
        return
    store.remove(f"runs/{name}/{HELD}")  # of an interrupted start
    if source.stored_identity != parent.identity:
        reason = "the run was removed or replaced before its checkpoint was copied"
        raise ProfileError("fork", f"{parent.run}@{parent.step}", reason)
    part = f"step_{parent.step}"
    try:
        source.copy_checkpoint(f"{run_files.CHECKPOINTS}/{part}", run, f"{HELD}/{part}")
    except FileNotFoundError as error:
        text = f"{parent.run}@{parent.step}"
        reason = f"run {parent.run} has removed this checkpoint (checkpoint.keep); fork from a later one"
        raise ProfileError("fork", text, reason, _nearest(source, parent.step)) from error
    # From the store: the local folder may be of another run of that name, or lack what another machine has trained since.
    lines = (source.read(run_files.METRICS) or b"").decode(errors="replace").splitlines()
    rows = [row for line in lines if (row := state_files.parse(line)) and is_metrics(row)]
    # Without the parent's totals, so that the fork's count its own time only.
    rows = [{key: row[key] for key in row if key not in TOTALS} for row in rows if row["step"] <= parent.step]
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    store.backend.write(f"runs/{name}/{HELD}/{run_files.METRICS}", text.encode())
    store.backend.write(f"runs/{name}/{HELD_PARENT}", json.dumps(asdict(parent)).encode())


def copy_checkpoint(store: Store, parent: Parent, name: str) -> None:
    """Give a run without a checkpoint its parent's checkpoint and metrics; safe to interrupt and repeat.

    Raises ProfileError if the parent has removed it.
    """
    run = store.run_folder(name)
    if _needs_checkpoint(run):
        hold_checkpoint(store, parent, name)
        # In the store too: another machine may continue the fork before this one has uploaded it.
        run.write(run_files.METRICS, run.read(f"{HELD}/{run_files.METRICS}") or b"")
        _warn_of_other_data(store, parent, run)
        part = f"step_{parent.step}"
        marker = f"{HELD}/{part}/{MARKER}"
        if (found := state_files.parse(run.read(marker) or b"")) is not None:  # else training rejects it
            store.backend.write(f"runs/{name}/{marker}", json.dumps({**found, "run": run.owner}).encode())
        run.copy_checkpoint(f"{HELD}/{part}", run, f"{run_files.CHECKPOINTS}/{part}")
        if run.checkpoint_steps() != [parent.step]:
            reason = "its copy is not complete; start the fork again"
            raise ProfileError("fork", f"{parent.run}@{parent.step}", reason)
    store.remove(f"runs/{name}/{HELD}")


def _needs_checkpoint(run: RunFolder) -> bool:
    """Whether a fork has never had a checkpoint; not if all of them are corrupted or missing."""
    if run.checkpoint_steps() or run.files(f"{run_files.CHECKPOINTS}/{QUARANTINE}"):
        return False
    return not run.read_json(run_files.RESUMED).get("saved")


def _warn_of_other_data(store: Store, parent: Parent, run: RunFolder) -> None:
    """Warn if an opened fork reads another dataset than its parent, from the parent's position on."""
    entry = ledger.find(store, parent.identity)
    if entry and entry.dataset != run.read_json(run_files.INPUTS).get("dataset"):
        message = "%s reads other data than %s, from the position of its step %d on: it may repeat some text and leave out other"
        log.warning(message, run.name, parent.run, parent.step)


def _held_parent(run: RunFolder) -> Parent | None:
    """The parent whose checkpoint was copied for a run that has not been opened; None if there is none."""
    found = run.read_json(HELD_PARENT)
    return Parent(**found) if found else None


def _nearest(run: RunFolder, wanted: int) -> list[str]:
    """A run's complete checkpoints that are nearest to a step, as RUN@STEP."""
    steps = sorted(run.checkpoint_steps(), key=lambda step: abs(step - wanted))
    return [f"{run.name}@{step}" for step in steps[:5]]
