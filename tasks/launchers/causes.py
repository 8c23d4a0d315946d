"""Why a job ended, from its log: torchrun names the rank that failed first on each node, and prefixes each rank's lines."""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tasks.launchers.base import Handle, JobFailed, Status

LOG_TAIL = 256 * 1024  # bytes of a log that are looked through for the cause of a failure
LAST = 20  # lines of a rank that count as its last ones
PREFIX = "[rank ${rank}] "  # of each line, as torchrun fills it in
ROOT_CAUSE = re.compile(
    r"Root Cause.*?time\s*:\s*(\S+).*?rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", re.DOTALL
)
# What the script on Slurm (batch.py) says at each start: a job that was queued again goes on in the same log.
START = re.compile(r"^job \d+, start \d+, on .*$", re.MULTILINE)
SPEAKER = re.compile(r"\[rank \d+\] ")
OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemory|oom[-_ ]kill|Cannot allocate memory|can't allocate memory|NRT_RESOURCE",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Cause:
    """The rank that failed first, and its exit code; negative: the signal that killed it."""

    rank: int
    exit_code: int


def attempt_log(handle: Handle) -> str:
    """The end of what this attempt has logged, from its last start on; the jobs of an array write in between each other."""
    try:
        with handle.job.log_file.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(handle.log_start, end - LOG_TAIL))
            log = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    starts = [] if handle.job.array else [start.end() for start in START.finditer(log)]
    return log[starts[-1] :] if starts else log


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


def want_of_memory(log: str) -> str | None:
    """The last line that tells of it: anywhere of Slurm's and torchrun's own, of a rank's only among its last ones.

    What a rank says earlier it has outlived.
    """
    said: Counter[str] = Counter()
    for line in reversed(log.splitlines()):
        speaker = SPEAKER.match(line)
        if speaker:
            said[speaker[0]] += 1
        if (speaker is None or said[speaker[0]] <= LAST) and OUT_OF_MEMORY.search(line):
            return line
    return None


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
    detail, decisive = list(last_lines(log, LAST)), want_of_memory(log)
    if decisive is not None and decisive not in detail:
        detail.append(decisive)
    return JobFailed(message, "\n".join(detail), code)


def how_it_ended(code: int) -> str:
    """An exit code in words."""
    if code < 0:
        name = signal.Signals(-code).name
        return f"was killed by {name}" + (", perhaps for want of memory" if name == "SIGKILL" else "")
    if code - 128 in set(signal.Signals):
        return f"was stopped by {signal.Signals(code - 128).name}"
    return f"ended with exit code {code}"
