"""Finds the cause of a job's failure in its log, where torchrun names each node's first failed rank."""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from collections.abc import Sequence

from profiles.files import exit_codes
from tasks.launchers.base import Handle, JobFailed, Status

LOG_TAIL = 256 * 1024  # bytes at the end of a log that are searched for the cause
DETAIL_LINES = 20
RANK_PREFIX = "[rank ${rank}] "  # of each log line; torchrun fills in the rank
RANK_LINE = re.compile(r"\[rank \d+\] ")
STEP_LINE = re.compile(r"\[rank \d+\] step +\d+/\d+ ")
MARKS = re.compile(
    r"(?:\[rank \d+\] )?[ ~^]*"
)  # of a traceback, below its lines; wrapped, they point nowhere
ROOT_CAUSE = re.compile(r"(?s)Root Cause.*?time\s*:\s*(\S+).*?rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)")
# The batch script (slurm_batch.sh.jinja) writes this line at each start: a requeued job continues in the same log.
START = re.compile(r"^job \d+, start \d+, on .*$", re.MULTILINE)
# Exit codes with which a rank may also end because another one has ended.
CONSEQUENCES = (1, exit_codes.INTERRUPTED, -signal.SIGABRT, -signal.SIGTERM)
OUT_OF_MEMORY = re.compile(
    rf"(?i)out ?of ?memory|oom[-_ ]kill|can(no|')t allocate memory|NRT_RESOURCE|{exit_codes.ALLOCATION_FAILED}"
)


def job_failure(handle: Handle, status: Status, nodes: Sequence[str] = ()) -> JobFailed:
    """Exception for a failed job, with the last lines of the first failed rank if known, else of the log."""
    log = _latest_log(handle)
    cause = _root_cause(log)
    code = status.exit_code
    lines = [line for line in log.splitlines() if not MARKS.fullmatch(line)]
    if cause is not None:
        rank, code = cause
        node = rank // handle.job.processes
        where = f" on {nodes[node]}" if node < len(nodes) else ""
        ended = f"rank {rank}{where} {_describe_exit(code)}"
        prefix = RANK_PREFIX.replace("${rank}", str(rank))
        lines = [line for line in lines if line.startswith(prefix)] or lines
    else:
        ended = status.note or _describe_exit(code or 0)
    detail, memory_error = lines[-DETAIL_LINES:], _memory_error(log)
    steps = [line for line in detail if STEP_LINE.match(line)]
    detail = [line for line in detail if line not in steps[:-1]]  # the latest shows how far the rank came
    if memory_error is not None and memory_error not in detail:
        detail.append(memory_error)
    return JobFailed(f"{handle.job.name}: {ended}; log: {handle.job.log_file}", "\n".join(detail), code)


def _latest_log(handle: Handle) -> str:
    """The log since the job's latest start, at most LOG_TAIL bytes; for a job array, since its submission."""
    try:
        with handle.job.log_file.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(handle.log_start, end - LOG_TAIL))
            log = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    starts = [] if handle.job.array else [start.end() for start in START.finditer(log)]
    return log[starts[-1] :] if starts else log


def _root_cause(log: str) -> tuple[int, int] | None:
    """The rank that failed first and its exit code (negative: a signal that killed it); None if unknown.

    The earliest of the root causes that each node's torchrun reports, if possible none of CONSEQUENCES.

    The failure of a rank makes ranks of other nodes fail within a second or two, while the clocks of nodes may differ by more.
    torchrun's timestamps have a resolution of a second; among equal times a killed rank is the cause.
    """
    found = (
        (int(code) in CONSEQUENCES, time, int(code) != -signal.SIGKILL, int(rank), int(code))
        for time, rank, code in ROOT_CAUSE.findall(log)
    )
    first = min(found, default=None)
    return None if first is None else first[-2:]


def _memory_error(log: str) -> str | None:
    """Last out-of-memory line: of Slurm or torchrun anywhere, of a rank only among its last lines.

    A rank survived whatever it reported earlier.
    """
    seen: Counter[str] = Counter()  # lines of each rank, from the end
    for line in reversed(log.splitlines()):
        rank = RANK_LINE.match(line)
        if rank:
            seen[rank[0]] += 1
        if (rank is None or seen[rank[0]] <= DETAIL_LINES) and OUT_OF_MEMORY.search(line):
            return line
    return None


def _describe_exit(code: int) -> str:
    """An exit code in words: "was killed by SIGKILL", "ended with exit code 1"."""
    if code < 0:
        name = signal.Signals(-code).name
        return f"was killed by {name}" + (" (possibly out of memory)" if name == "SIGKILL" else "")
    if code - 128 in set(signal.Signals):
        return f"was stopped by {signal.Signals(code - 128).name}"
    return f"ended with exit code {code}"
