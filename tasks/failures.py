"""What the end of a failed job means: whether another attempt may end better, and what to change where it will not.

The programs on the devices tell by their exit codes (modeling/exits.py); memory that ran out without their knowing is told
by what the system says of it. Everything else counts as a failure of the machines, and is retried.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from modeling import exits, planner
from profiles.check import check, tensor_degrees
from profiles.errors import ProfileError
from profiles.schema import Profile
from tasks.launchers import JobFailed
from tasks.launchers.causes import NO_MEMORY

TOLD = re.compile(r"^\[rank \d+\] (?:\w+\.)*(\w*(?:Error|Superseded)|refused): (.*)$", re.MULTILINE)


class Hopeless(JobFailed):
    """A job that would end alike if it were started again; the message says what to change."""


def classified(profile: Profile, failure: JobFailed) -> JobFailed:
    """The failure with what is known of its cause, as `Hopeless` where no further attempt is to be made."""
    code = failure.exit_code
    if code == exits.REFUSED:
        told = TOLD.findall(failure.detail)
        return _as(Hopeless, failure, told[-1][1] if told else "what it was started with was refused")
    if code == exits.DIVERGED:
        return _as(Hopeless, failure, "bad losses went on after going back; try a lower train.learning_rate")
    if code == exits.HUNG:
        return _as(
            JobFailed,
            failure,
            "a rank stood still; the stacks of all are in the folder stacks beside the log",
        )
    # What else is said of memory counts where no rank knew better.
    if code == exits.OUT_OF_MEMORY or NO_MEMORY.search(failure.detail):
        return _as(Hopeless, failure, f"out of memory; {_advice(profile)}")
    return failure


def _as(kind: type[JobFailed], failure: JobFailed, words: str) -> JobFailed:
    return kind(f"{words} ({failure})", failure.detail, failure.exit_code)


def _advice(profile: Profile) -> str:
    """What would take less memory, as the planner sees it."""
    now = _fullest(profile)
    found = []
    for change, other in _alternatives(profile):
        try:
            check(other)
        except ProfileError:
            continue
        then = _fullest(other)
        if then < now:
            found.append(f"{change} (planned {then / 2**30:.2g} GiB a device instead of {now / 2**30:.2g})")
    return f"try {' or '.join(found)}" if found else "try more devices, or a smaller model"


def _fullest(profile: Profile) -> int:
    return max(stage.total for stage in planner.plan(profile).stages)


def _alternatives(profile: Profile) -> Iterator[tuple[str, Profile]]:
    train, parallel, model = profile.train, profile.parallel, profile.model
    if train.micro_batch_size > 1:
        smaller = next(n for n in range(train.micro_batch_size - 1, 0, -1) if train.micro_batch_size % n == 0)
        yield _changed(profile, "train", "micro_batch_size", smaller)
    further = {"none": "selective", "selective": "full"}.get(train.recompute)
    if further:
        yield _changed(profile, "train", "recompute", further)
    degrees = tensor_degrees(model.num_attention_heads, model.num_key_value_heads)
    higher = next((degree for degree in degrees if degree > parallel.tensor), None)
    if higher:
        yield _changed(profile, "parallel", "tensor", higher)


def _changed(profile: Profile, section: str, key: str, value: Any) -> tuple[str, Profile]:
    part = getattr(profile, section).model_copy(update={key: value})
    return f"{section}.{key}={value}", profile.model_copy(update={section: part})
