"""What the end of a failed job means: whether another attempt may end better, and what to change where it will not.

The programs on the devices tell by their exit codes (modeling/exit_codes.py); memory that ran out without their knowing is told
by what the system says of it. Everything else counts as a failure of the machines, and is retried.
"""

from __future__ import annotations

import re

from modeling import exit_codes
from modeling.planning import planner
from profiles.schema import Profile
from tasks.launchers import JobFailed
from tasks.launchers.causes import OUT_OF_MEMORY

TOLD = re.compile(r"^\[rank \d+\] (?:\w+\.)*(\w*(?:Error|StaleAttempt)|rejected): (.*)$", re.MULTILINE)


class Hopeless(JobFailed):
    """A job that would end alike if it were started again; the message says what to change."""


def classified(profile: Profile, failure: JobFailed) -> JobFailed:
    """The failure with what is known of its cause, as `Hopeless` where no further attempt is to be made."""
    code = failure.exit_code
    if code == exit_codes.REJECTED:
        told = TOLD.findall(failure.detail)
        return _as(Hopeless, failure, told[-1][1] if told else "what it was started with was refused")
    if code == exit_codes.DIVERGED:
        return _as(
            Hopeless,
            failure,
            "bad losses went on, and there is nothing more to go back to; try a lower train.learning_rate",
        )
    if code == exit_codes.HUNG or exit_codes.HANG_MESSAGE in failure.detail:
        return _as(
            JobFailed,
            failure,
            "a rank stood still; the stacks of all are in the folder stacks beside the log",
        )
    # What else is said of memory counts where no rank knew better.
    if code == exit_codes.OUT_OF_MEMORY or OUT_OF_MEMORY.search(failure.detail):
        return _as(Hopeless, failure, f"out of memory; {_advice(profile)}")
    return failure


def _as(kind: type[JobFailed], failure: JobFailed, words: str) -> JobFailed:
    return kind(f"{words} ({failure})", failure.detail, failure.exit_code)


def _advice(profile: Profile) -> str:
    """What would take less memory, as the planner sees it."""
    now = planner.plan(profile).needs
    found = [
        f"{change} (planned {planned.needs / 2**30:.2g} GiB a device instead of {now / 2**30:.2g})"
        for change, planned in planner.lighter(profile, lambda other: other.needs < now).items()
    ]
    return f"try {' or '.join(found)}" if found else "try more devices, or a smaller model"
