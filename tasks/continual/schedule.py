"""The learning rate schedule of a round of continual pretraining."""

from __future__ import annotations

import logging

from profiles.schema import Profile
from tasks.steps import dataset
from tasks.store.artifacts import Artifact

# Phases of the learning-rate schedule, in order of priority.
PHASES = ("warmup_steps", "constant_steps", "minimum_steps")
log = logging.getLogger(__name__)


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
