"""Slurm's queue from squeue: one query of the controller serves all jobs that this process follows."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from parallel import device as devices
from profiles.files.retry_policies import SCHEDULER
from tasks.launchers.base import JobFailed, Unavailable, job_environment

COMMAND_TIMEOUT = 60.0  # seconds
# Of the variables of these prefixes, Slurm's commands inside a job get only those that say how to reach the cluster. The others
# describe the job that runs this process: the submitted one would take them for its own (task binding, memory, array index).
# The user's SBATCH_ACCOUNT and similar defaults stay.
JOB_PREFIXES = ("SLURM_", "SLURMD_", "SRUN_", "SBATCH_CPU_BIND", "SBATCH_MEM_BIND")
REACHING = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_SACK_SOCKET")
FORMAT = "%F|%T|%M|%j|%k|%r"
LAUNCH_FAILED = "launch failed requeued held"  # reason after a node's prolog failed, for example


class ControllerUnavailable(Unavailable):
    """The Slurm controller did not answer."""


@dataclass(frozen=True)
class QueueEntry:
    """A job, or one of a job array, as squeue shows it."""

    identifier: str  # that of the array, for a job of an array
    state: str
    time_used: str
    name: str
    comment: str
    reason: str

    @property
    def held(self) -> bool:
        """Whether Slurm holds the job until it is released, because a node, now drained, failed to launch it."""
        return self.state == "PENDING" and self.reason == LAUNCH_FAILED

    @property
    def ended(self) -> bool:
        """Whether the job has ended and Slurm only cleans up after it, for instance in an epilog.

        A requeued job is COMPLETING too until its nodes are cleaned up, but with no time used.
        """
        return self.state == "COMPLETING" and self.time_used != "0:00"


class Queue:
    """The user's jobs, read again only if the latest reading is too old; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read_at = -float("inf")
        self._entries: list[QueueEntry] = []
        self._error: ControllerUnavailable | None = None

    def read(self, max_age: float = 0.0) -> list[QueueEntry]:
        """All jobs, oldest first, as they were at most `max_age` seconds ago. Raises ControllerUnavailable."""
        asked_at = time.monotonic()
        with self._lock:
            if self._read_at < asked_at - max_age:
                self._read_at = time.monotonic()
                try:
                    self._entries, self._error = _query(), None
                except JobFailed as error:
                    self._error = ControllerUnavailable(str(error))
            if self._error is not None:
                raise ControllerUnavailable(str(self._error))
            return self._entries

    def require(self) -> list[QueueEntry]:
        """All jobs as they are now; retries a controller that does not answer. Raises ControllerUnavailable."""
        deadline = time.monotonic() + SCHEDULER.seconds
        while True:
            try:
                return self.read()
            except ControllerUnavailable:
                if time.monotonic() > deadline:
                    raise
                time.sleep(SCHEDULER.delays[0])


def _query() -> list[QueueEntry]:
    """Jobs of this user in all partitions, hidden ones too."""
    rows = run_command(["squeue", "--noheader", "--me", "--all", f"--format={FORMAT}"]).splitlines()
    fields = [row.strip().split("|", 5) for row in rows]
    # Rows that do not parse belong to other jobs, whose names and comments may contain anything.
    entries = [QueueEntry(*row) for row in fields if len(row) == 6 and row[0].isdigit()]
    return sorted(entries, key=lambda entry: int(entry.identifier))


def run_command(
    command: Sequence[str],
    *,
    folder: Path | None = None,
    secrets: Sequence[tuple[str, str]] = (),
    check: bool = True,
) -> str:
    """Run one of Slurm's commands and return its stdout; sbatch passes the environment on to the job.

    Raises JobFailed with its stderr.
    """
    environment = _environment() | dict(secrets)
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            capture_output=True,
            encoding="utf-8",
            errors="replace",  # a job's comment or a user's name may be in another encoding
            timeout=COMMAND_TIMEOUT,
        )
    except subprocess.TimeoutExpired as error:
        raise JobFailed(f"{command[0]}: no answer within {COMMAND_TIMEOUT:.0f} s") from error
    if check and done.returncode != 0:
        raise JobFailed(f"{command[0]}: {' '.join(done.stderr.split()) or f'exit code {done.returncode}'}")
    return done.stdout


def _environment() -> dict[str, str]:
    inherited = job_environment()
    dropped: tuple[str, ...] = ("SQUEUE_",)  # a user's settings could hide jobs
    if "SLURM_JOB_ID" in inherited:
        # Also the address of the enclosing job's collectives, which a user's value would otherwise replace ours by.
        dropped += JOB_PREFIXES + tuple(
            filter(None, (device.communicator for device in devices.KINDS.values()))
        )
    return {
        name: value for name, value in inherited.items() if name in REACHING or not name.startswith(dropped)
    }
