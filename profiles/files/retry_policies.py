"""How long outages are survived: delays before retries of files, networks, schedulers and servers.

`python -m profiles.files.retry_policies` prints the table of docs/operating/outages.md. All such delays are here, but two rules
are elsewhere: a run whose first saves all fail ends (FIRST_SAVES in modeling/training/recovery/checkpoints.py), and the copy of a
run folder is uploaded again every minute (INTERVAL in tasks/store/sync.py). The library `parallel` may not import this module:
`parallel/checkpoint/locations.py` repeats CHECKPOINT_READ as READ_PAUSES. Change both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

MINUTE, HOUR = 60.0, 3600.0


@dataclass(frozen=True)
class Policy:
    """Retries of one kind of access.

    Attributes:
        access: what is retried, in words.
        delays: seconds before each retry; random deviations come on top.
        then: what happens after the last retry, in words.
        endless: whether the last delay applies to all further retries.
    """

    access: str
    delays: tuple[float, ...]
    then: str
    endless: bool = False

    @property
    def seconds(self) -> float:
        """How long an outage may last: the sum of all delays."""
        return sum(self.delays)


def every(delay: float, seconds: float) -> tuple[float, ...]:
    """Equal delays that add up to so many seconds."""
    return (delay,) * round(seconds / delay)


FILE = Policy(
    "reading or writing a file or object of the store, except errors that a retry cannot fix, such as a full disk",
    (0.1, 0.5, 2.0),  # on an object store, after the client's own retries
    "the step is retried",
)
NETWORK = Policy(
    "the hub, and sources on object stores; longer if the server asks for it with `Retry-After`",
    (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, *every(60.0, 3 * MINUTE)),
    "the step is retried",
)
STEP = Policy("a step of a flow that failed for any other reason than its input", (2.0, 4.0), "the run fails")
TRAINING = Policy(
    "an attempt of training, while storage or scheduler are unavailable",
    (30.0, 60.0, 120.0, 300.0, *every(600.0, HOUR)),
    "it counts as any other failure",
)
RESTART = Policy(
    "an attempt of training, after any other failure",
    (*STEP.delays, 8.0, 16.0, 30.0),
    "after `cluster.retries` failures without a new checkpoint, the run fails",
    endless=True,
)
SHARD = Policy(
    "a shard of training data on an object store, by a job",
    (*NETWORK.delays, *every(60.0, 16 * MINUTE)),  # less than the phase `data` may take
    "the attempt is retried",
)
CHECKPOINT_READ = Policy("a read of a checkpoint, by a job", (1.0, 4.0, 15.0), "the attempt is retried")
LAST_SAVE = Policy(
    "the last checkpoint; others are saved again after 1, 2, 4, … steps",
    (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, *every(60.0, 59 * MINUTE)),
    "the attempt is retried, from the latest checkpoint",
)
STOPPED_SAVE = Policy(
    "the last checkpoint of a job that is being stopped",
    LAST_SAVE.delays[1:4],  # fits into its grace period
    "the latest checkpoint is the one before",
)
SCHEDULER = Policy(
    "Slurm's controller, before a job is submitted, found or cancelled",
    every(1.0, 5 * MINUTE),
    "the step is retried",
)
STATUS = Policy(
    "the status of a job, on Slurm or Kubernetes",
    every(0.2, 10 * MINUTE),
    "the step is retried; the job keeps running",
)
REQUEUE = Policy(
    "a job's requeue of itself, on Slurm", every(5.0, 10 * MINUTE), "the flow submits another job"
)
RELEASE = Policy(
    "the release of a job whose launch failed, on Slurm",
    (5.0, 30.0, 120.0, 300.0, 600.0),  # each failed launch may cost another node
    "the job stays held, with a warning",
)
SERVER = Policy(
    "Prefect's server, by a flow run; training continues",
    (2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0),  # Prefect's own
    "the flow run fails; its job keeps running",
)
STOPPED_SERVER = Policy(
    "Prefect's server, by a flow run that is being stopped",
    SERVER.delays[:3],
    "its state remains that of before",
)
SERVER_START = Policy(
    "a configured Prefect server that refuses connections", every(0.2, 2 * MINUTE), "the command fails"
)
SERVER_BUSY = Policy(
    "a Prefect server that answers with 503, by `trainshed up`", every(1.0, 10.0), "the command fails"
)
SERVER_HOME = Policy(
    "the folder of a local Prefect server, by the server",
    every(0.1, 1 * MINUTE),
    "the server ends; a command that uses it starts another",
)
TRACKER = Policy(
    "W&B, MLflow and other trackers; training continues", (1.0, 2.0, 5.0, 10.0, 30.0), "", endless=True
)

POLICIES = tuple(each for each in globals().values() if isinstance(each, Policy))


def table() -> str:
    """All policies as a Markdown table."""
    rows = [("what is retried", "after", "survives", "then"), ("---",) * 4]
    rows += [
        (each.access, _delays(each), "any outage" if each.endless else _duration(each.seconds), each.then)
        for each in POLICIES
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _delays(policy: Policy) -> str:
    """The delays in words; the last ones, if they are equal or endless, as one."""
    runs = [(delay, len([*equal])) for delay, equal in groupby(policy.delays)]
    last, count = runs[-1]
    first = [*policy.delays[:-count]]
    if count == 1 and not policy.endless:
        return f"{_numbers(policy.delays)} s"
    rest = f"every {last:g} s"
    return f"{_numbers(first)} s, then {rest}" if first else rest


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def _duration(seconds: float) -> str:
    """Rounded seconds, minutes or hours."""
    for unit, name in ((HOUR, "hour"), (MINUTE, "minute")):
        if seconds >= unit:
            count = round(seconds / unit)
            return f"{count} {name}{'s' * (count > 1)}"
    return f"{round(seconds)} s"


if __name__ == "__main__":
    print(table(), end="")
