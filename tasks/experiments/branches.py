"""The runs of a branches file: a trunk of constant rate, and branches that decay from its checkpoints.

Extending the trunk or adding a branch keeps finished runs cached: the length of the trunk's constant schedule is not part of its
identity, and a branch depends on the trunk only up to its own first step.
"""

from __future__ import annotations

from modeling.scaling.planned_run import PlannedRun
from profiles.errors import ProfileError
from profiles.experiments import TRUNK, Average, Branch, Branches
from tasks.fork import decay_settings, require_same_mixture
from tasks.store.store import Store


def trunk_of(spec: Branches, store: Store | None = None) -> PlannedRun:
    """The trunk, up to the last branch's step, or further if the store's trunk is longer.

    Raises:
        ProfileError: its profile is invalid, or a branch does not start from one of its checkpoints.
    """
    name, every = f"{spec.name}-{TRUNK}", spec.every
    for number, branch in enumerate(spec.branches):
        if branch.step % every:
            below = branch.step // every * every
            reason = f"is not a multiple of every = {every}, so the trunk has no checkpoint there"
            nearest = [step for step in (below, below + every) if step]
            raise ProfileError(f"branches.{number}.step", branch.step, reason, nearest)
    steps = max(branch.step for branch in spec.branches)
    if store is not None:
        steps = max([steps, *store.run_folder(name).checkpoint_steps()])
    settings = {
        "train.schedule": "constant",
        "train.steps": steps,
        "train.epochs": "null",
        "train.constant_steps": 0,
        "train.minimum_rate_steps": 0,
        "checkpoint.every": every,
        "checkpoint.keep_every": every,
    }
    overrides = (*spec.overrides, *(f"{key}={value}" for key, value in settings.items()))
    return PlannedRun.load(spec.target, overrides, name)


def branches_of(spec: Branches, trunk: PlannedRun) -> list[PlannedRun]:
    """Branches, ordered by first step. Raises ProfileError, with its key, for an impossible one."""
    found: dict[str, PlannedRun] = {}
    for number, branch in enumerate(spec.branches):
        name = name_of(spec, branch)
        try:
            decay = decay_settings(trunk.profile.train, trunk.name, branch.step, decay_of(spec, branch))
            overrides = (*trunk.overrides, *decay, *branch.overrides)
            run = PlannedRun.load(spec.target, overrides, name, f"{trunk.name}@{branch.step}")
            require_same_mixture(trunk.profile, run.profile, trunk.name, branch.step)
        except ProfileError as error:
            raise error.within(f"branches.{number}") from None
        if name in found or name == trunk.name:
            raise ProfileError(f"branches.{number}", name, "is listed twice; give one of them another name")
        found[name] = run
    return sorted(found.values(), key=lambda run: (run.first_step, run.profile.train.steps))


def decay_of(spec: Branches, branch: Branch) -> int:
    return branch.decay or max(1, round(spec.decay * branch.step))


def name_of(spec: Branches, branch: Branch) -> str:
    return f"{spec.name}-{branch.name or f'{branch.step}-{decay_of(spec, branch)}'}"


def require_members(spec: Branches, trunk: PlannedRun, branches: list[PlannedRun]) -> None:
    """Raise ProfileError for an average whose checkpoints these runs will not have at their ends."""
    for average in spec.averages:
        members_of(spec, average, trunk, branches, None)


def members_of(
    spec: Branches, average: Average, trunk: PlannedRun, branches: list[PlannedRun], store: Store | None
) -> list[tuple[str, int]]:
    """Run and step of an average's checkpoints. Raises ProfileError if a run or checkpoint is missing.

    Args:
        store: that has the runs' checkpoints; None: those that the runs will have at their ends.
    """
    found = []
    for text in average.of:
        run, end = _resolve_member(spec, average, text, trunk, branches)
        # Those of the schedule: one that was saved because the run was interrupted must not change the average.
        every, planned = run.profile.checkpoint.every, (run.first_step, end)
        saved = store.run_folder(run.name).checkpoint_steps() if store else _planned_checkpoints(run)
        steps = [step for step in saved if step in planned or (every and step < end and step % every == 0)]
        if len(steps) < average.last or end not in steps:
            reason = f"{run.name} has the checkpoints {', '.join(map(str, steps)) or 'none'} up to step {end}"
            raise ProfileError(f"averages.{average.name}.last", average.last, reason)
        found += [(run.name, step) for step in steps[-average.last :]]
    if len(found) < 2:
        raise ProfileError(
            f"averages.{average.name}", None, "contains only one checkpoint; set last, or name more runs"
        )
    return found


def _planned_checkpoints(run: PlannedRun) -> list[int]:
    """Steps of a run's checkpoints at its end: a branch also has a copy of the one that it starts from."""
    first, end, every = run.first_step, run.profile.train.last_step, run.profile.checkpoint.every
    between = [step for step in range(every, end, every) if step > first] if every else []
    return [*([first] if first else []), *between, end]


def _resolve_member(
    spec: Branches, average: Average, text: str, trunk: PlannedRun, branches: list[PlannedRun]
) -> tuple[PlannedRun, int]:
    """Run and last step of a member of an average. Raises ProfileError for an unknown member."""
    name, at, step = text.partition("@")
    key = f"averages.{average.name}.of"
    if name == TRUNK:
        if not at:
            return trunk, trunk.profile.train.last_step
        if step.isdecimal() and not int(step) % spec.every and 0 < int(step) <= trunk.profile.train.last_step:
            return trunk, int(step)
        reason = f"is not a checkpoint of the trunk, which saves one every {spec.every} steps"
        raise ProfileError(key, text, reason)
    prefix = f"{spec.name}-"
    known = {run.name.removeprefix(prefix): run for run in branches}
    if name not in known or at:
        raise ProfileError(key, text, "is neither trunk, trunk@STEP nor a branch", [TRUNK, *known])
    return known[name], known[name].profile.train.last_step
