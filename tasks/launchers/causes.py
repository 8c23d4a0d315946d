"""Why a job ended, from its log: torchrun names the rank that failed first on each node, and prefixes each rank's lines."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from tasks.launchers.base import Handle, JobFailed, Status

LOG_TAIL = 256 * 1024  # bytes of a log that are looked through for the cause of a failure
PREFIX = "[rank ${rank}] "  # of each line, as torchrun fills it in
ROOT_CAUSE = re.compile(
    r"Root Cause.*?time\s*:\s*(\S+).*?rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", re.DOTALL
)


@dataclass(frozen=True)
class Cause:
    """The rank that failed first, and its exit code; negative: the signal that killed it."""

    rank: int
    exit_code: int


def attempt_log(handle: Handle) -> str:
    """The end of what this attempt has logged."""
    try:
        with handle.job.log_file.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(handle.log_start, end - LOG_TAIL))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""


def first_cause(log: str) -> Cause | None:
    """Of the root causes that each node's torchrun gives, the first in time.

    A killed rank takes those of other nodes along within the same second, which is as fine as torchrun's times are:
    then the killed one is the cause.
    """
    found = (
        (time, int(code) != -signal.SIGKILL, int(rank), int(code))
        for time, rank, code in ROOT_CAUSE.findall(log)
    )
    first = min(found, default=None)
    return None if first is None else Cause(first[2], first[3])


def last_lines(log: str, lines: int) -> Sequence[str]:
    """Those of the rank that failed first, where that is known, else of all."""
    cause, found = first_cause(log), log.splitlines()
    if cause is not None:
        prefix = PREFIX.replace("${rank}", str(cause.rank))
        found = [line for line in found if line.startswith(prefix)] or found
    return found[-lines:]


def failure(handle: Handle, status: Status, nodes: Sequence[str] = ()) -> JobFailed:
    """What to raise for a job that ended badly; `nodes` are the names of the job's nodes, in the order of the ranks."""
    log = attempt_log(handle)
    cause = first_cause(log)
    code = status.exit_code
    if cause is not None:
        code = cause.exit_code
        node = cause.rank // handle.job.processes
        where = f" on {nodes[node]}" if node < len(nodes) else ""
        ended = f"rank {cause.rank}{where} {how_it_ended(code)}"
    else:
        ended = status.note or how_it_ended(code or 0)
    message = f"{handle.job.name}: {ended}; its log: {handle.job.log_file}"
    return JobFailed(message, "\n".join(last_lines(log, 20)), code)


def how_it_ended(code: int) -> str:
    """An exit code in words."""
    if code < 0:
        name = signal.Signals(-code).name
        return f"was killed by {name}" + (", perhaps for want of memory" if name == "SIGKILL" else "")
    if code - 128 in set(signal.Signals):
        return f"was stopped by {signal.Signals(code - 128).name}"
    return f"ended with exit code {code}"
