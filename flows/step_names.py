"""Names of the steps of a run, in their order; `graphs` and `checkpoint` run in the background."""

from __future__ import annotations

from profiles.errors import ProfileError, closest
from profiles.schema import Profile

# Before there is a run folder.
PREPARATION = ("plan", "graphs", "resolve", "tokenizer", "checkpoint", "dataset")
STEPS = (*PREPARATION, "reference", "train", "evaluate", "export")
LAST = "report"


def check_last_step(run: Profile, until: str) -> None:
    """Raise ProfileError if the run has no step of this name to end with."""
    if until == LAST:
        raise ProfileError("until", until, "is the last step of every run; leave --until out")
    steps = [step for step in STEPS if step != "reference" or run.precomputes_reference]
    if until and until not in steps:
        raise ProfileError("until", until, "is not a step of this run", closest(until, steps))
