"""Launcher for Slurm clusters, through sbatch, squeue, scontrol and scancel.

A running job is found by its name, so any process can re-attach to it. Its batch script (slurm_batch.py) writes a record with the
exit code as soon as its ranks have ended. The queue does not show it: Slurm forgets jobs within minutes, and lists them while an
epilog runs. So the queue is queried often only after a change. While the controller does not answer, a job counts as running.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from parallel import device as devices
from profiles.errors import ProfileError
from profiles.files import folders, retry_policies, state_files
from profiles.files.jsonl import size_of
from profiles.schema import Cluster
from tasks.launchers import causes, slurm_batch
from tasks.launchers.base import HANDLE, NODE_FAILED, Handle, Job, JobFailed, Status, write_handle
from tasks.launchers.environment import log_differences
from tasks.launchers.slurm_queue import ControllerUnavailable, Queue, QueueEntry, run_command

log = logging.getLogger(__name__)

POLL_SECONDS = 15.0  # between queries of the controller; the record is read at every poll
CHANGED_SECONDS = 2.0  # between the first queries after a change
CANCEL_SECONDS = 5.0  # at most, between queries while a job is being cancelled
KILL_SECONDS = 60.0  # for a killed job to leave the queue
HELD_SECONDS = 5.0  # that a requeued job keeps waiting while its nodes clean up
RELEASE_PAUSES = retry_policies.RELEASE.delays  # before each release of a job whose launch failed
# For a record to become visible on a shared file system after its job has left the queue: NFS caches attributes, and the absence
# of files, for up to 60 s (acdirmax), on mounts with `nocto` also when the folder is listed.
GONE_SECONDS = 90.0
STATE = re.compile(r"\bJobState=(\S+) Reason=(\S+)")

_queue = Queue()


@dataclass
class _Watch:
    """Polling state of one job; times are of time.monotonic."""

    changed_at: float
    # State in the queue, "" once it has left, and whether there is a record.
    seen: tuple[str, bool] | None = None
    due_at: float = 0.0  # when to query the queue again
    held_since: float | None = None  # first query that found it held after a requeue
    pending_reason: str = ""
    releases: int = 0  # of the job, since its latest start
    release_at: float = 0.0  # when to release it again
    latest_start: list[str] | None = None  # the one that these two are about

    def observe(self, state: str, recorded: bool) -> None:
        if (state, recorded) != self.seen:
            self.seen, self.changed_at = (state, recorded), time.monotonic()

    @property
    def interval(self) -> float:
        """Seconds between queries of the queue: short after a change, then increasing."""
        return min(POLL_SECONDS, max(CHANGED_SECONDS, (time.monotonic() - self.changed_at) / 3))

    @property
    def status(self) -> Status:
        """Status of the job while it is in the queue."""
        return Status(running=True, pending=self.seen is not None and self.seen[0] == "PENDING")


class SlurmLauncher:
    """Runs jobs as Slurm batch jobs, and finds running ones by name.

    Args:
        cluster: the profile's section, with partition, time limit and further sbatch options.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._watches: dict[str, _Watch] = {}  # by job identifier

    def submit(self, job: Job) -> Handle:
        """Queue a job; cancels another of its name and folder. Raises ProfileError if Slurm cannot log there."""
        if special := [mark for mark in str(job.folder) if mark in "%\\" or not mark.isprintable()]:
            reason = f"Slurm cannot write a log to {str(job.folder)!r} because of {special[0]!r}; choose another --store"
            raise ProfileError("cluster.launcher", "slurm", reason)
        state_files.retried(partial(state_files.make_folder, job.folder))
        if running := self.find(job):
            return running
        for other in self._active(job):
            self.cancel(Handle(job, other.identifier), grace=self._cluster.grace)
        log_differences(job.name, dict(devices.resolve(self._cluster.device).environment), os.environ)
        _warn_of_export(os.environ.get("SBATCH_EXPORT", "ALL"))
        submission = uuid.uuid4().hex[:16]
        path = job.folder / f"{job.name}.sbatch"
        path.write_text(slurm_batch.script(job, self._cluster, submission))
        if job.attempt_file:
            slurm_batch.create_attempt_file(job.attempt_file)
        log_start = size_of(job.log_file)
        handle = Handle(job, self._sbatch(job, submission), log_start)
        write_handle(handle)
        first = self.find(job)
        if first and first.identifier != handle.identifier:  # another process submitted it at the same time
            run_command(["scancel", handle.identifier])
            handle = Handle(job, first.identifier, log_start)
            write_handle(handle)
        log.info("%s: submitted as Slurm job %s; script: %s", job.name, handle.identifier, path)
        return handle

    def find(self, job: Job) -> Handle | None:
        for entry in self._active(job):
            same = entry.comment.partition(".")[0] == job.fingerprint
            if same and not _has_exit_code(self._record(job, entry.identifier)):
                state = state_files.read_json(job.handle_file, HANDLE, HANDLE) or {}
                is_latest = state.get("identifier") == entry.identifier
                return Handle(job, entry.identifier, state["log_start"] if is_latest else 0)
        return None

    def poll(self, handle: Handle) -> Status:
        record = self._record(handle.job, handle.identifier)
        if record and _has_exit_code(record):
            return Status(running=False, exit_code=record["exit_code"])
        watch = self._watches.setdefault(handle.identifier, _Watch(time.monotonic()))
        if watch.seen and watch.seen[1] != (record is not None):
            watch.observe(watch.seen[0], record is not None)
            watch.due_at = 0.0
        now = time.monotonic()
        if now < watch.due_at:
            return watch.status
        try:
            # A query for another job is reused, unless it is older than the latest change.
            entry = self._entry(handle, max_age=min(watch.interval, now - watch.changed_at))
        except ControllerUnavailable as error:
            log.debug("%s", error)
            watch.due_at = now + watch.interval
            return watch.status
        if record is None and (entry is None or entry.ended):
            record = self._record(handle.job, handle.identifier, listed=True)
            if record and _has_exit_code(record):
                return Status(running=False, exit_code=record["exit_code"])
        watch.observe(entry.state if entry else "", record is not None)
        watch.due_at = now + watch.interval
        if record and (entry is None or entry.ended):
            return Status(running=False, note=self._end_without_exit_code(handle))
        if entry is None:
            gone = now - watch.changed_at > GONE_SECONDS
            return Status(running=not gone, note=self._end_without_exit_code(handle) if gone else "")
        self._log_pending_reason(handle, entry, watch)
        self._release(handle, entry, watch)
        return replace(watch.status, event=self._release_held(handle, entry, watch))

    def location(self, handle: Handle) -> str:
        return "" if self._has_ended(handle, self._entry(handle)) else f"Slurm job {handle.identifier}"

    def cancel(self, handle: Handle, grace: float) -> None:
        entry = self._entry(handle)
        if entry is None or self._has_ended(handle, entry):
            return
        if entry.state == "RUNNING" and grace > 0:
            run_command(["scancel", "--batch", "--signal=USR2", handle.identifier], check=False)
            if self._await_end(handle, grace):
                return
        run_command(["scancel", handle.identifier], check=False)
        if not self._await_end(handle, KILL_SECONDS / 4):
            run_command(["scancel", "--full", "--signal=KILL", handle.identifier], check=False)
            if not self._await_end(handle, KILL_SECONDS, killed=True):
                log.warning("%s: Slurm job %s still queued after scancel", handle.job.name, handle.identifier)

    def failure(self, handle: Handle, status: Status) -> JobFailed:
        record = self._record(handle.job, handle.identifier) or {}
        return causes.job_failure(handle, status, record.get("nodes", "").split(","))

    def _sbatch(self, job: Job, submission: str) -> str:
        """Submit the job's script; returns its identifier, from the queue if sbatch's answer is lost."""
        # On the command line, --export replaces SBATCH_EXPORT, such as NONE, which would withhold secrets too.
        command = ["sbatch", "--parsable", "--export=ALL", f"{job.name}.sbatch"]
        try:
            return run_command(command, folder=job.folder, secrets=job.secrets).strip().partition(";")[0]
        except JobFailed as error:
            queued = [entry for entry in _queue.require() if entry.comment.partition(".")[2] == submission]
            if not queued:
                raise
            log.warning("%s; but Slurm has queued the job", error)
            return queued[0].identifier

    def _has_ended(self, handle: Handle, entry: QueueEntry | None, killed: bool = False) -> bool:
        """Whether the job's processes have ended for good; `killed`: by SIGKILL, so none writes a record."""
        record = self._record(handle.job, handle.identifier, listed=entry is not None and entry.ended)
        if entry is None or _has_exit_code(record):
            return True
        return entry.ended and (killed or record is not None)

    def _await_end(self, handle: Handle, seconds: float, *, killed: bool = False) -> bool:
        """Whether the job ends within `seconds`; polls the queue with backoff, and when a record appears."""
        start, asked_at, recorded = time.monotonic(), -math.inf, False
        while True:
            record, now = self._record(handle.job, handle.identifier), time.monotonic()
            if _has_exit_code(record):
                return True
            pause = min(CANCEL_SECONDS, max(0.5, (now - start) / 3))
            if (record is not None) != recorded or now - asked_at > pause:
                recorded, asked_at = record is not None, now
                if self._has_ended(handle, self._entry(handle), killed):
                    return True
            if now - start > seconds:
                return False
            time.sleep(0.3)

    def _active(self, job: Job) -> list[QueueEntry]:
        """Jobs of this name that have not ended, oldest first. Raises ControllerUnavailable."""
        name = slurm_batch.job_name(job)
        return [entry for entry in _queue.require() if entry.name == name and not entry.ended]

    def _entry(self, handle: Handle, max_age: float | None = None) -> QueueEntry | None:
        """The job's queue entry; None once gone. Raises ControllerUnavailable, after retries if no `max_age`."""
        entries = _queue.require() if max_age is None else _queue.read(max_age)
        found = [entry for entry in entries if entry.identifier == handle.identifier]
        found.sort(key=lambda entry: not entry.held)  # of an array, which shows as several
        return found[0] if found else None

    def _record(self, job: Job, identifier: str, *, listed: bool = False) -> dict[str, Any] | None:
        """The record of the job's end, if written (see slurm_batch.py); of an array, once all have one.

        Of an array's records, the one with the highest exit code, or one without.

        Args:
            listed: list the folder first, so that an NFS client asks the server again for files that it has cached as absent.
        """
        if listed:
            with suppress(FileNotFoundError):
                os.listdir(job.folder)
        suffixes = [f".{index}" for index in range(job.array)] or [""]
        records: list[dict[str, Any]] = []
        for suffix in suffixes:
            try:
                record = json.loads(state_files.contents(job.folder / f"{job.name}{suffix}.exit.json"))
            except (FileNotFoundError, ValueError):
                return None
            if record["job"] != identifier:
                return None
            records.append(record)
        return max(records, key=lambda record: record["exit_code"] if _has_exit_code(record) else math.inf)

    def _log_pending_reason(self, handle: Handle, entry: QueueEntry, watch: _Watch) -> None:
        """Log why a job is pending, when the reason changes."""
        reason = entry.reason if entry.state == "PENDING" else ""
        if reason not in ("", "None", watch.pending_reason):
            log.info("%s: Slurm job %s is pending: %s", handle.job.name, handle.identifier, reason)
        watch.pending_reason = reason

    def _release(self, handle: Handle, entry: QueueEntry, watch: _Watch) -> None:
        """Start a requeued job now; Slurm holds it for two minutes."""
        requeued = watch.releases or _starts(handle)
        if entry.state != "PENDING" or entry.reason != "BeginTime" or not requeued:
            watch.held_since = None
            return
        now = time.monotonic()
        if watch.held_since is None:
            watch.held_since = now
        if now - watch.held_since > HELD_SECONDS:
            run_command(["scontrol", "update", f"JobId={handle.identifier}", "StartTime=now"], check=False)

    def _release_held(self, handle: Handle, entry: QueueEntry, watch: _Watch) -> tuple[str, str] | None:
        """Release a job that Slurm holds because its launch failed. Returns the event, if something was done.

        Each failed launch costs the job a node, which Slurm drains; so it is released RELEASE_PAUSES times at most.
        """
        if not entry.held:
            return None
        now, number = time.monotonic(), handle.identifier
        if (start := _starts(handle)) != watch.latest_start:
            watch.latest_start, watch.releases, watch.release_at = start, 0, now + RELEASE_PAUSES[0]
        if now < watch.release_at:
            return None
        reason = f"a node failed to launch Slurm job {number}, and is drained"
        if watch.releases == len(RELEASE_PAUSES):
            watch.release_at = math.inf
            todo = f"see sinfo --list-reasons, then run scontrol release {number}"
            event = "held", f"{reason}; the job is held after {watch.releases} releases: {todo}"
        else:
            run_command(["scontrol", "release", number], check=False)
            watch.releases += 1
            watch.release_at = now + [*RELEASE_PAUSES, RELEASE_PAUSES[-1]][watch.releases]
            event = "released", f"{reason}; released the job, {watch.releases} of {len(RELEASE_PAUSES)} times"
        log.warning("%s: %s", handle.job.name, event[1])
        return event

    def _end_without_exit_code(self, handle: Handle) -> str:
        """Why a job without a recorded exit code ended."""
        output = run_command(["scontrol", "--oneliner", "show", "job", handle.identifier], check=False)
        state = STATE.search(output)
        if state and (state[1] == "TIMEOUT" or state[2] == "TimeLimit"):
            limit = self._cluster.time or "its partition's"
            key = "cluster.time_left" if handle.job.attempt_file else "cluster.time"
            return f"Slurm ended job {handle.identifier} at its time limit ({limit}); increase {key}"
        how = f" (state {state[1]}, reason {state[2]})" if state else ""
        return f"Slurm ended job {handle.identifier}{how}, or {NODE_FAILED}"


@cache  # warns once per process
def _warn_of_export(export: str) -> None:
    if export != "ALL":
        reason = "jobs get the environment of this process; to keep a variable out, unset it here"
        log.warning("SBATCH_EXPORT=%s has no effect: %s", export, reason)


def _has_exit_code(record: dict[str, Any] | None) -> bool:
    return record is not None and record["exit_code"] is not None


def _starts(handle: Handle) -> list[str]:
    """The job's latest start; for an array, the starts of its jobs. Without any, --begin may delay it."""
    paths = folders.matches(handle.job.folder, f"{handle.job.name}*.start")
    starts = (path.read_text() for path in paths)
    return sorted(start for start in starts if start.startswith(f"{handle.identifier}."))
