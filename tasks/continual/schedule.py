"""The learning rate schedule of a round of continual pretraining.

`rewarm`: warm-up and decay, as in the profile. `trunk`: a constant rate over the round's steps, then a decay for the evaluation.
The checkpoint between the two, from which the next round continues with its optimizer, is saved and kept.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from profiles.errors import ProfileError
from profiles.schema import Profile, Train
from tasks.steps import dataset
from tasks.store.artifacts import Artifact

# Phases of the learning-rate schedule, in order of priority.
PHASES = ("warmup_steps", "constant_steps", "minimum_rate_steps")
DECAY = 0.2  # by default: steps of a trunk's decay as a share of those before it
log = logging.getLogger(__name__)


def of_round(profile: Profile, new: Artifact, replay: float = 0.0) -> Profile:
    """The profile with a round's schedule; arguments as of `with_shortened_schedule`."""
    if not profile.continual.is_trunk:
        return with_shortened_schedule(profile, new, replay)
    constant = profile.train.model_copy(update=dict.fromkeys(PHASES, 0))
    profile = with_shortened_schedule(profile.model_copy(update={"train": constant}), new, replay)
    train, saved = profile.train, profile.checkpoint
    # A few more steps, so that the checkpoint before the decay is one of the intervals'.
    steps = train.steps or 1
    saves = math.ceil(steps / (saved.every or steps))
    every = math.ceil(steps / saves)
    trunk = every * saves
    decay = max(1, round((profile.continual.decay or DECAY) * trunk))
    shape = "linear" if train.schedule == "constant" else train.schedule
    schedule = {"steps": trunk + decay, "constant_steps": trunk, "schedule": shape}
    return profile.model_copy(
        update={
            "train": train.model_copy(update=schedule),
            "checkpoint": saved.model_copy(update={"every": every, "keep_every": trunk}),
        }
    )


def constant_rate_steps(train: Train, steps: Sequence[int]) -> list[int]:
    """Those of a run's steps at its constant learning rate: after the warm-up, before the decay."""
    last = math.inf if train.schedule == "constant" else train.warmup_steps + train.constant_steps
    return [step for step in steps if train.warmup_steps < step <= last]


def check_trunk(profile: Profile, promoted: Profile) -> None:
    """Check that a round continues a trunk as the promoted model's run trained it. Raises ProfileError."""
    if not profile.continual.is_trunk:
        return
    for key in ("learning_rate", "optimizer"):
        ours, theirs = getattr(profile.train, key), getattr(promoted.train, key)
        if ours != theirs:
            reason = f"is not that of {promoted.name}, whose trunk a round continues; a round with rewarm may change it"
            raise ProfileError(f"train.{key}", ours, reason, [theirs, "continual.schedule=rewarm"])


def with_shortened_schedule(profile: Profile, new: Artifact, replay: float = 0.0) -> Profile:
    """Resolve `train.epochs` to steps over the new data; shortens schedule phases that do not fit.

    Ignores `data.schedule`: its steps are those of the series' first run, and its sources may have no new data.

    Args:
        replay: share of the round's samples that are replayed.
    """
    if profile.data.schedule:
        log.warning(
            "data.schedule: ignored in continual pretraining; new data is drawn by the weights of data.sources"
        )
        data = profile.data.model_copy(update={"schedule": []})
        profile = profile.model_copy(update={"data": data})
    train = profile.train
    if train.epochs is None:
        return profile
    free = train.model_copy(update=dict.fromkeys(PHASES, 0))
    steps = dataset.with_steps(profile.model_copy(update={"train": free}), new, replay).train.steps or 0
    fitting: dict[str, int | None] = {"steps": steps, "epochs": None}
    left = steps
    for name in PHASES:
        wanted = getattr(train, name)
        fitting[name] = phase = min(wanted, left)
        left -= phase
        if phase < wanted:
            message = "train.%s: reduced from %d to %d: the new data has %d steps"
            log.info(message, name, wanted, phase, steps)
    return profile.model_copy(update={"train": train.model_copy(update=fitting)})
