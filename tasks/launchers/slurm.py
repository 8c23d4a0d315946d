"""Jobs on a Slurm cluster, with the four commands that every one has: sbatch, squeue, scontrol and scancel.

A job is found again by its name, so whoever watches may die and be started anew; how it ended is in the record that its script
wrote (batch.py), since Slurm forgets jobs within minutes. A controller that does not answer for a while changes nothing: the
job runs on, and is asked about again.
"""

from __future__ import annotations

import json
import logging
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profiles.errors import ProfileError
from profiles.schema import Cluster
from tasks.launchers import base, batch, causes
from tasks.launchers.base import Handle, Job, JobFailed, Status

log = logging.getLogger(__name__)

ASK_SECONDS = 2.0  # between questions to the controller; the record is looked for at every poll
TIMEOUT = 60.0  # seconds of one command
PATIENCE = 300.0  # seconds that a controller may be silent where nothing can be done without it
FORCE_SECONDS = 60.0  # until a job that was killed must be gone
HELD_SECONDS = 5.0  # that a job which was queued again is left to wait: its nodes tidy up
GONE_SECONDS = 10.0  # that a record may take to be seen through a shared file system, once its job is gone
STATE = re.compile(r"\bJobState=(\S+) Reason=(\S+)")


@dataclass(frozen=True)
class Line:
    """A job as squeue shows it."""

    identifier: str
    state: str
    fingerprint: str
    reason: str


class SlurmLauncher:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._asked: dict[str, float] = {}  # when the controller was last asked about each job
        self._gone: dict[str, float] = {}  # since when it has not known each job any more
        self._held: dict[str, float] = {}  # since when each job waits to be started again
        self._reason = ""

    def submit(self, job: Job) -> Handle:
        """Queue the job; its script is kept as <name>.sbatch in its folder. What runs in its place is stopped first.

        Raises:
            ProfileError: a folder with characters in its path that mean something to Slurm.
        """
        unfit = [
            character for character in str(job.folder) if character in "%\\" or not character.isprintable()
        ]
        if unfit:
            reason = f"Slurm cannot keep a log in {str(job.folder)!r}, because of {unfit[0]!r}; give another --store"
            raise ProfileError("cluster.launcher", "slurm", reason)
        job.folder.mkdir(parents=True, exist_ok=True)
        running = self.find(job)
        if running is not None:
            return running
        for other in self._queue(
            job
        ):  # of the same name, but not the same: two must not write into one folder
            self.cancel(Handle(job, other.identifier), grace=self._cluster.grace)
        path = job.folder / f"{job.name}.sbatch"
        path.write_text(batch.script(job, self._cluster))
        start = job.log_file.stat().st_size if job.log_file.exists() else 0
        told = _run(["sbatch", "--parsable", path.name], folder=job.folder, secrets=dict(job.secrets))
        identifier = told.strip().partition(";")[0]
        first = min(self._queue(job), key=lambda line: int(line.identifier), default=None)
        if first and first.identifier != identifier:  # somebody else was as quick
            _run(["scancel", identifier])
            identifier = first.identifier
        log.info("%s is job %s of Slurm; its script: %s", job.name, identifier, path)
        handle = Handle(job, identifier, start)
        job.note_file.write_text(json.dumps({"identifier": identifier, "log_start": start}))
        return handle

    def find(self, job: Job) -> Handle | None:
        for line in self._queue(job):
            if line.fingerprint == batch.fingerprint(job) and self._record(job, line.identifier) is None:
                return Handle(job, line.identifier, _log_start(job, line.identifier))
        return None

    def poll(self, handle: Handle) -> Status:
        record = self._record(handle.job, handle.identifier)
        if record is not None:
            return Status(running=False, exit_code=record["exit_code"])
        now = time.monotonic()
        if now - self._asked.get(handle.identifier, -ASK_SECONDS) < ASK_SECONDS:
            return Status(running=True)
        self._asked[handle.identifier] = now
        try:
            line = self._line(handle, patience=0)
        except SlurmSilent as error:
            log.debug("%s", error)
            return Status(running=True)
        if line is not None:
            self._gone.pop(handle.identifier, None)
            self._tell(handle, line)
            self._release(handle, line)
            return Status(running=True)
        if now - self._gone.setdefault(handle.identifier, now) < GONE_SECONDS:
            return Status(running=True)
        return Status(running=False, note=self._epitaph(handle))

    def location(self, handle: Handle) -> str:
        return f"job {handle.identifier} of Slurm" if self._line(handle) else ""

    def tail(self, handle: Handle, lines: int) -> Sequence[str]:
        return causes.last_lines(causes.attempt_log(handle), lines)

    def failure(self, handle: Handle, status: Status) -> JobFailed:
        record = self._record(handle.job, handle.identifier) or {}
        return causes.failure(handle, status, record.get("nodes", "").split(","))

    def cancel(self, handle: Handle, grace: float) -> None:
        line = self._line(handle)
        if line is not None and line.state == "RUNNING" and grace > 0:
            _run(["scancel", "--batch", "--signal=USR2", handle.identifier], check=False)
            self._await_end(handle, grace)
        if self._line(handle) is None:
            return
        _run(["scancel", handle.identifier], check=False)
        if not self._await_end(handle, FORCE_SECONDS / 4):
            _run(["scancel", "--full", "--signal=KILL", handle.identifier], check=False)
            if not self._await_end(handle, FORCE_SECONDS):
                log.warning(
                    "Slurm still has job %s of %s, though it was cancelled",
                    handle.identifier,
                    handle.job.name,
                )

    def _await_end(self, handle: Handle, seconds: float) -> bool:
        """Whether the job is gone from the queue within so many seconds."""
        deadline = time.monotonic() + seconds
        while self._line(handle) is not None:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.3)
        return True

    def _line(self, handle: Handle, patience: float = PATIENCE) -> Line | None:
        """The job as it waits, runs or ends just now; None where it is gone. Raises SlurmSilent."""
        return next(
            (line for line in self._queue(None, patience) if line.identifier == handle.identifier), None
        )

    def _queue(self, job: Job | None, patience: float = PATIENCE) -> list[Line]:
        """Our own jobs that wait, run or end just now, of this one's name or all, oldest first. Raises SlurmSilent."""
        arguments = ["squeue", "--noheader", "--me", "--format=%F|%T|%k|%r"]
        if job is not None:
            arguments.append(f"--name={batch.job_name(job)}")
        deadline = time.monotonic() + patience
        while True:
            try:
                rows = _run(arguments).splitlines()
                break
            except JobFailed as error:
                if time.monotonic() > deadline:
                    raise SlurmSilent(str(error)) from error
                time.sleep(1)
        lines = [Line(*row.strip().split("|", 3)) for row in rows]
        return sorted(lines, key=lambda line: int(line.identifier))

    def _record(self, job: Job, identifier: str) -> dict[str, Any] | None:
        """How the job ended, if its script has said so; of an array, how the one that ended worst did."""
        parts = [f".{index}" for index in range(job.array)] or [""]
        records = []
        for part in parts:
            try:
                record = json.loads((job.folder / f"{job.name}{part}.exit.json").read_text())
            except (FileNotFoundError, ValueError):
                return None
            if record["job"] != identifier:
                return None
            records.append(record)
        return max(records, key=lambda record: record["exit_code"])

    def _tell(self, handle: Handle, line: Line) -> None:
        """Say once why a job waits."""
        reason = line.reason if line.state == "PENDING" else ""
        if reason not in ("", "None", self._reason):
            log.info("%s waits in Slurm's queue: job %s, %s", handle.job.name, handle.identifier, reason)
        self._reason = reason

    def _release(self, handle: Handle, line: Line) -> None:
        """Have a job that was queued again start now; Slurm holds it for two minutes, whatever became of its nodes."""
        if line.state != "PENDING" or line.reason != "BeginTime" or not _has_started(handle):
            self._held.pop(handle.identifier, None)
            return
        now = time.monotonic()
        if now - self._held.setdefault(handle.identifier, now) > HELD_SECONDS:
            _run(["scontrol", "update", f"JobId={handle.identifier}", "StartTime=now"], check=False)

    def _epitaph(self, handle: Handle) -> str:
        """How a job ended that left no record."""
        shown = _run(["scontrol", "--oneliner", "show", "job", handle.identifier], check=False)
        state = STATE.search(shown)
        if state and state[1] == "TIMEOUT":
            limit = self._cluster.time or "its partition's"
            more = "cluster.time_left" if handle.job.attempt_file else "cluster.time"  # to save, or to end
            return f"Slurm ended job {handle.identifier} at its time limit, {limit}; give {more} more"
        how = f"in state {state[1]} ({state[2]})" if state else "without a word"
        return f"Slurm ended job {handle.identifier} {how}, or its node died"


class SlurmSilent(JobFailed):
    """The controller did not answer."""


def _has_started(handle: Handle) -> bool:
    """Whether a job has run before: else somebody's own --begin may hold it."""
    starts = (path.read_text() for path in handle.job.folder.glob(f"{handle.job.name}*.start"))
    return any(start.startswith(f"{handle.identifier}.") for start in starts)


def _log_start(job: Job, identifier: str) -> int:
    """Where the log of this job begins, if it is the one that was submitted last."""
    try:
        note = json.loads(job.note_file.read_text())
    except (FileNotFoundError, ValueError):
        return 0
    return note["log_start"] if note["identifier"] == identifier else 0


def _run(
    command: Sequence[str],
    *,
    folder: Path | None = None,
    check: bool = True,
    secrets: Mapping[str, str] | None = None,
) -> str:
    """A command's standard output. Raises JobFailed with what it said."""
    environment = {**base.environment(), **(secrets or {})}  # sbatch hands it on to the job
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise JobFailed(f"{command[0]} did not answer within {TIMEOUT:.0f} s") from error
    if check and done.returncode != 0:
        raise JobFailed(f"{command[0]}: {' '.join(done.stderr.split()) or f'exit code {done.returncode}'}")
    return done.stdout
