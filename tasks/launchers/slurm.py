"""Launcher for Slurm clusters, through sbatch, squeue, scontrol and scancel.

A running job is found by its name, so any process can re-attach to it. Its exit code is read from the record that its batch
script writes (batch.py), since Slurm forgets jobs within minutes. While the controller does not answer, a job counts as running.
"""

from __future__ import annotations

import json
import logging
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from profiles.errors import ProfileError
from profiles.schema import Cluster
from tasks.launchers import batch, causes
from tasks.launchers.base import Handle, Job, JobFailed, Status, job_environment

log = logging.getLogger(__name__)

POLL_SECONDS = 2.0  # between queries of the controller; the record is read at every poll
COMMAND_TIMEOUT = 60.0  # seconds
RETRY_SECONDS = 300.0  # of retrying a controller that does not answer, where nothing can be done without it
KILL_SECONDS = 60.0  # for a killed job to leave the queue
HELD_SECONDS = 5.0  # that a requeued job is left waiting, while its nodes clean up
GONE_SECONDS = 10.0  # for a record to become visible on a shared file system after its job has left the queue
STATE = re.compile(r"\bJobState=(\S+) Reason=(\S+)")


@dataclass(frozen=True)
class QueueEntry:
    """A job as squeue shows it; `fingerprint` is its comment (batch.fingerprint)."""

    identifier: str
    state: str
    fingerprint: str
    reason: str


class SlurmLauncher:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        # Times by job identifier:
        self._queried: dict[str, float] = {}  # last query of the controller
        self._gone: dict[str, float] = {}  # first query that no longer found the job
        self._held: dict[str, float] = {}  # first query that found the job held after a requeue
        self._pending_reason = ""

    def submit(self, job: Job) -> Handle:
        """Queue the job; cancels another of its name and folder. Raises ProfileError for a path that Slurm cannot log to."""
        if special := [mark for mark in str(job.folder) if mark in "%\\" or not mark.isprintable()]:
            reason = f"Slurm cannot write a log to {str(job.folder)!r} because of {special[0]!r}; choose another --store"
            raise ProfileError("cluster.launcher", "slurm", reason)
        job.folder.mkdir(parents=True, exist_ok=True)
        if running := self.find(job):
            return running
        for other in self._queue(job):
            self.cancel(Handle(job, other.identifier), grace=self._cluster.grace)
        path = job.folder / f"{job.name}.sbatch"
        path.write_text(batch.script(job, self._cluster))
        log_start = job.log_file.stat().st_size if job.log_file.exists() else 0
        identifier = _run(["sbatch", "--parsable", path.name], job).strip().partition(";")[0]
        first = next(iter(self._queue(job)), None)
        if first and first.identifier != identifier:  # another process submitted it at the same time
            _run(["scancel", identifier])
            identifier = first.identifier
        log.info("%s: submitted as Slurm job %s; script: %s", job.name, identifier, path)
        job.handle_file.write_text(json.dumps({"identifier": identifier, "log_start": log_start}))
        return Handle(job, identifier, log_start)

    def find(self, job: Job) -> Handle | None:
        for entry in self._queue(job):
            if entry.fingerprint == batch.fingerprint(job) and self._record(job, entry.identifier) is None:
                return Handle(job, entry.identifier, _log_start(job, entry.identifier))
        return None

    def poll(self, handle: Handle) -> Status:
        if record := self._record(handle.job, handle.identifier):
            return Status(running=False, exit_code=record["exit_code"])
        now = time.monotonic()
        if now - self._queried.get(handle.identifier, -POLL_SECONDS) < POLL_SECONDS:
            return Status(running=True)
        self._queried[handle.identifier] = now
        try:
            entry = self._entry(handle, retry_seconds=0)
        except ControllerUnavailable as error:
            log.debug("%s", error)
            return Status(running=True)
        if entry is not None:
            self._gone.pop(handle.identifier, None)
            self._log_pending_reason(handle, entry)
            self._release(handle, entry)
            return Status(running=True)
        if now - self._gone.setdefault(handle.identifier, now) < GONE_SECONDS:
            return Status(running=True)
        return Status(running=False, note=self._end_without_record(handle))

    def location(self, handle: Handle) -> str:
        return f"Slurm job {handle.identifier}" if self._entry(handle) else ""

    def cancel(self, handle: Handle, grace: float) -> None:
        entry = self._entry(handle)
        if entry is not None and entry.state == "RUNNING" and grace > 0:
            _run(["scancel", "--batch", "--signal=USR2", handle.identifier], check=False)
            self._await_end(handle, grace)
        if self._entry(handle) is None:
            return
        _run(["scancel", handle.identifier], check=False)
        if not self._await_end(handle, KILL_SECONDS / 4):
            _run(["scancel", "--full", "--signal=KILL", handle.identifier], check=False)
            if not self._await_end(handle, KILL_SECONDS):
                log.warning("%s: Slurm job %s still queued after scancel", handle.job.name, handle.identifier)

    def failure(self, handle: Handle, status: Status) -> JobFailed:
        record = self._record(handle.job, handle.identifier) or {}
        return causes.job_failure(handle, status, record.get("nodes", "").split(","))

    def _await_end(self, handle: Handle, seconds: float) -> bool:
        """Whether the job leaves the queue within this time."""
        deadline = time.monotonic() + seconds
        while self._entry(handle) is not None:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.3)
        return True

    def _entry(self, handle: Handle, retry_seconds: float = RETRY_SECONDS) -> QueueEntry | None:
        """The job's entry in the queue; None once it has left. Raises ControllerUnavailable."""
        entries = self._queue(None, retry_seconds)
        return next((entry for entry in entries if entry.identifier == handle.identifier), None)

    def _queue(self, job: Job | None, retry_seconds: float = RETRY_SECONDS) -> list[QueueEntry]:
        """The user's jobs, of this job's name or all, oldest first. Raises ControllerUnavailable after `retry_seconds`."""
        arguments = ["squeue", "--noheader", "--me", "--format=%F|%T|%k|%r"]
        if job is not None:
            arguments.append(f"--name={batch.job_name(job)}")
        deadline = time.monotonic() + retry_seconds
        while True:
            try:
                rows = _run(arguments).splitlines()
                break
            except JobFailed as error:
                if time.monotonic() > deadline:
                    raise ControllerUnavailable(str(error)) from error
                time.sleep(1)
        entries = [QueueEntry(*row.strip().split("|", 3)) for row in rows]
        return sorted(entries, key=lambda entry: int(entry.identifier))

    def _record(self, job: Job, identifier: str) -> dict[str, Any] | None:
        """The record of the job's end, if written; of an array, the record with the highest exit code once all are written."""
        suffixes = [f".{index}" for index in range(job.array)] or [""]
        records = []
        for suffix in suffixes:
            try:
                record = json.loads((job.folder / f"{job.name}{suffix}.exit.json").read_text())
            except (FileNotFoundError, ValueError):
                return None
            if record["job"] != identifier:
                return None
            records.append(record)
        return max(records, key=lambda record: record["exit_code"])

    def _log_pending_reason(self, handle: Handle, entry: QueueEntry) -> None:
        """Log why a job is pending, when the reason changes."""
        reason = entry.reason if entry.state == "PENDING" else ""
        if reason not in ("", "None", self._pending_reason):
            log.info("%s: Slurm job %s is pending: %s", handle.job.name, handle.identifier, reason)
        self._pending_reason = reason

    def _release(self, handle: Handle, entry: QueueEntry) -> None:
        """Start a requeued job now; Slurm holds it for two minutes."""
        if entry.state != "PENDING" or entry.reason != "BeginTime" or not _has_started(handle):
            self._held.pop(handle.identifier, None)
            return
        now = time.monotonic()
        if now - self._held.setdefault(handle.identifier, now) > HELD_SECONDS:
            _run(["scontrol", "update", f"JobId={handle.identifier}", "StartTime=now"], check=False)

    def _end_without_record(self, handle: Handle) -> str:
        """Why a job ended that left no record."""
        output = _run(["scontrol", "--oneliner", "show", "job", handle.identifier], check=False)
        state = STATE.search(output)
        if state and state[1] == "TIMEOUT":
            limit = self._cluster.time or "its partition's"
            key = "cluster.time_left" if handle.job.attempt_file else "cluster.time"
            return f"Slurm ended job {handle.identifier} at its time limit ({limit}); increase {key}"
        how = f" (state {state[1]}, reason {state[2]})" if state else ""
        return f"Slurm ended job {handle.identifier}{how}, or its node failed"


class ControllerUnavailable(JobFailed):
    """The Slurm controller did not answer."""


def _has_started(handle: Handle) -> bool:
    """Whether the job has run before; if not, the user's --begin may be what holds it."""
    starts = (path.read_text() for path in handle.job.folder.glob(f"{handle.job.name}*.start"))
    return any(start.startswith(f"{handle.identifier}.") for start in starts)


def _log_start(job: Job, identifier: str) -> int:
    """Log offset at which this job starts, if it is the one submitted last."""
    try:
        state = json.loads(job.handle_file.read_text())
    except (FileNotFoundError, ValueError):
        return 0
    return state["log_start"] if state["identifier"] == identifier else 0


def _run(command: Sequence[str], job: Job | None = None, *, check: bool = True) -> str:
    """Run a command, in the job's folder if given, and return its stdout. Raises JobFailed with its stderr."""
    environment = job_environment() | dict(job.secrets if job else ())  # sbatch passes it on to the job
    folder = job.folder if job else None
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=COMMAND_TIMEOUT
        )
    except subprocess.TimeoutExpired as error:
        raise JobFailed(f"{command[0]}: no answer within {COMMAND_TIMEOUT:.0f} s") from error
    if check and done.returncode != 0:
        raise JobFailed(f"{command[0]}: {' '.join(done.stderr.split()) or f'exit code {done.returncode}'}")
    return done.stdout
