"""Classifies failed jobs: whether to retry, and what to change if a retry would fail again.

Job modules report the cause by exit code (profiles/files/exit_codes.py); running out of memory is also recognised by the
system's messages (tasks/launchers/causes.py). Everything else, such as a rank killed by SIGKILL without such a message,
counts as a failure of the machines and is retried, as often as RetryBudget (tasks/steps/training.py) allows.
"""

from __future__ import annotations

import errno
import logging
import re

from modeling.planning import planner
from profiles.files import exit_codes
from profiles.files.state_files import NotRegularFile
from profiles.schema import Profile
from tasks.launchers import JobFailed
from tasks.launchers.base import Unavailable
from tasks.launchers.causes import OUT_OF_MEMORY

log = logging.getLogger(__name__)

# Last line of a rank's error.
REASON = re.compile(
    r"^\[rank \d+\] (?:\w+\.)*(\w*(?:Error|StaleAttempt|CorruptCheckpoint|LoadFailed|SaveGivenUp)|rejected): (.*)$",
    re.MULTILINE,
)
HUNG = "a rank hung"  # start of a hang's cause
RESTARTING = "restarting %s, attempt %d of %d"  # log message before a retry
# Errors of ranks whose cause is the storage. An OSError without a number is of another kind, such as a library that is missing.
OUTAGE = re.compile(
    r"LoadFailed: |SaveGivenUp: |OSError: \[Errno (?!12\])|RuntimeError: rank 0: OSError\((?!12\b)\d"
)  # 12: memory
# Denied access as the operating system reports it, and a link that points to itself (40). s3fs raises PermissionError without a
# number, also for expired credentials, which may be renewed later. On the file system of a cluster, a server that restarts may
# deny access for a moment, so that it counts as any other failure there.
PERMANENT_REASONS = re.compile(r"PermissionError\(13,|OSError\(40,|\[Errno 40\]")
# Errors of the flow that would persist.
PERSISTENT = (
    *(FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError),
    NotRegularFile,
)


class FatalError(JobFailed):
    """Fatal (non-retryable) failure: a retry would fail the same way; the message says what to change."""


def classify(profile: Profile, failure: JobFailed) -> JobFailed:
    """Return the failure with its cause, as `FatalError` if a retry would fail again."""
    code, reasons = failure.exit_code, REASON.findall(failure.detail)
    if code == exit_codes.REJECTED:
        return _as(FatalError, failure, reasons[-1][1] if reasons else "its input was rejected")
    if code == exit_codes.DIVERGED:
        cause = (
            "the loss diverged, and the run cannot roll back further: fork it from an earlier checkpoint, if it has one, or "
            "start it under another name, with a lower train.learning_rate"
        )
        return _as(FatalError, failure, cause)
    if code == exit_codes.HUNG or exit_codes.HANG_MESSAGE in failure.detail:
        cause = f"{HUNG}; the stacks of all ranks are in logs/stacks of the run folder"
        return _as(JobFailed, failure, cause)
    if reasons and OUTAGE.match(": ".join(reasons[-1])):
        kind: type[JobFailed] = Unavailable
        if PERMANENT_REASONS.search(reasons[-1][1]):
            kind = FatalError if profile.cluster.launcher == "local" else JobFailed
        return _as(kind, failure, reasons[-1][1])
    if reasons and reasons[-1][0] == "StaleAttempt":
        return _as(JobFailed, failure, reasons[-1][1])
    # The system's out-of-memory messages count only if no rank reported another cause.
    if code == exit_codes.OUT_OF_MEMORY or OUT_OF_MEMORY.search(failure.detail):
        return _as(FatalError, failure, f"out of memory; {_advice(profile)}")
    return failure


def is_outage(failure: BaseException) -> bool:
    """Whether the cluster or the storage was unavailable, so that a retry may succeed later."""
    if isinstance(failure, OSError):
        return not isinstance(failure, PERSISTENT) and failure.errno != errno.ELOOP
    return isinstance(failure, Unavailable)


def explain(profile: Profile, failure: JobFailed) -> JobFailed:
    """`classify` a failure and log its last lines, at DEBUG if fatal: the message says what to change."""
    explained = classify(profile, failure)
    level = logging.DEBUG if isinstance(explained, FatalError) else logging.WARNING
    log.log(level, "%s\n%s", failure, failure.detail)
    return explained


def _as(kind: type[JobFailed], failure: JobFailed, cause: str) -> JobFailed:
    return kind(f"{cause} ({failure})", failure.detail, failure.exit_code)


def _advice(profile: Profile) -> str:
    """Profile changes that need less memory, according to the planner."""
    current = planner.plan(profile).needs
    changes = [
        f"{change} (planned {planned.needs / 2**30:.1f} GiB per device instead of {current / 2**30:.1f})"
        for change, planned in planner.lighter(profile, lambda other: other.needs < current).items()
    ]
    return f"try {' or '.join(changes)}" if changes else "try more devices, or a smaller model"
