"""The interface of every launcher (submit, find, poll, tail, cancel), and `execute`, which sees one job through.

A job is a Python module that runs on the devices. Its log and the launcher's own notes lie in the job's folder, so
that an orchestrator that died can be started again, find the job, and go on watching it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

log = logging.getLogger(__name__)

PATIENCE = 600.0  # seconds without an answer about a job until nobody asks any more
SAFE_PATH = {
    "PYTHONSAFEPATH": "1"
}  # `python -m` must not prefer a user's tasks.py in the working folder to ours
NOT_FOR_JOBS = ("PREFECT_", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")  # beginnings of names


@dataclass(frozen=True)
class Job:
    """`python -m program arguments`, on `nodes` × `processes` ranks, or as one plain process where `processes` is 0.

    Attributes:
        threads: of torch, a process.
        key: of what the job is for; where many share a cluster, it tells one run's jobs from another's.
        array: so many jobs of their own, each told its number as --index; 0: one job.
        attempts: file that counts the job's starts; the program is told the count as --attempt.
        secrets: environment that is written into no file.
    """

    name: str
    program: str
    arguments: tuple[str, ...]
    folder: Path
    nodes: int = 1
    processes: int = 0
    threads: int | None = None
    key: str = ""
    array: int = 0
    attempt_file: Path | None = None
    secrets: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    def with_arguments(self, *arguments: str) -> Job:
        return replace(self, arguments=(*self.arguments, *arguments))

    @property
    def log_file(self) -> Path:
        return self.folder / f"{self.name}.log"

    @property
    def note_file(self) -> Path:
        return self.folder / f"{self.name}.job.json"

    @property
    def essence(self) -> list[object]:
        """What makes two jobs the same, as JSON has it."""
        return [self.program, list(self.arguments), self.nodes, self.processes, self.array]


@dataclass(frozen=True)
class Handle:
    """A job that was submitted: what identifies it to its launcher."""

    job: Job
    identifier: str
    log_start: int = 0  # bytes of the log that earlier attempts wrote


@dataclass(frozen=True)
class Status:
    """`exit_code` is None while the job runs, and where it ended with nobody watching; `note` says how it ended else."""

    running: bool
    exit_code: int | None = None
    note: str = ""


class JobFailed(RuntimeError):
    """A job ended badly; the message says how, and where its log is.

    Attributes:
        detail: its last lines that matter.
        exit_code: of the rank that failed first, where that is known, else of the job.
    """

    def __init__(self, message: str, detail: str = "", exit_code: int | None = None) -> None:
        super().__init__(message)
        self.detail = detail
        self.exit_code = exit_code


def environment() -> dict[str, str]:
    """The environment of jobs: this process's without the addresses and secrets of servers, and with SAFE_PATH."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(NOT_FOR_JOBS)}
    return {**inherited, **SAFE_PATH}


class Launcher(Protocol):
    def submit(self, job: Job) -> Handle:
        """Start the job and return at once."""

    def find(self, job: Job) -> Handle | None:
        """The job of this name and folder, if one is still running: nobody may start it twice."""

    def poll(self, handle: Handle) -> Status:
        """How the job is doing; quick enough to be asked several times a second."""

    def location(self, handle: Handle) -> str:
        """Where the job is to be found by hand, 'job 12 of Slurm', whoever submitted it; empty where it is over."""

    def tail(self, handle: Handle, lines: int) -> Sequence[str]:
        """The last lines that matter of this attempt: those of the rank that failed first, where that is known."""

    def cancel(self, handle: Handle, grace: float) -> None:
        """End the job: a signal, then `grace` seconds for a last checkpoint, then by force. Nothing is left running."""

    def failure(self, handle: Handle, status: Status) -> JobFailed:
        """How a job ended that did not end well: 'rank 1 on n2 was killed by SIGKILL', and its last lines."""


def execute(
    launcher: Launcher,
    job: Job,
    watch: Callable[[], None] = lambda: None,
    *,
    timeout: float | None = None,
    grace: float = 30.0,
    poll_seconds: float = 0.2,
) -> None:
    """Run a job to its end, calling `watch` several times a second, or join it where it is running already.

    What ends this process on purpose (Ctrl-C, a cancellation: no `Exception`, but a `BaseException`) ends the job too.
    Nothing else does, since a file that cannot be read for a while, or an error in what `watch` shows, says nothing about
    the job: it is asked about again, and left running where no answer comes for `PATIENCE`.

    Args:
        timeout: seconds that the job may take.
        grace: seconds that it has to save when it is ended.

    Raises:
        JobFailed: the job ended with another exit code than 0, or it cannot be told for `PATIENCE` how it is doing.
        TimeoutError: it ran longer than `timeout` seconds, and was ended.
    """
    handle = launcher.find(job)
    if handle is None:
        handle = launcher.submit(job)
    else:
        log.warning("%s is still running: joined it instead of starting another", job.name)
    begun = known = time.monotonic()
    once = _Once()
    try:
        while True:
            try:
                running, failure = _state(launcher, handle)
                known = time.monotonic()
            except Exception as error:
                running, failure = True, None
                once.warn(error, f"it cannot be told just now how {job.name} is doing; it is asked again")
                if time.monotonic() - known > PATIENCE:
                    raise JobFailed(_lost(job, error)) from error
            try:
                watch()
            except Exception as error:
                once.warn(error, f"it cannot be shown what {job.name} does; it runs on")
            if failure is not None:
                raise failure
            if not running:
                return
            if timeout is not None and time.monotonic() - begun > timeout:
                launcher.cancel(handle, grace)
                raise TimeoutError(f"{job.name} took longer than {timeout:.0f} s; its log: {job.log_file}")
            time.sleep(poll_seconds)
    except BaseException as error:
        if not isinstance(error, Exception):
            log.warning("stopping %s; it may take a moment to save where it is", job.name)
            launcher.cancel(handle, grace)
        raise


def _state(launcher: Launcher, handle: Handle) -> tuple[bool, JobFailed | None]:
    """Whether a job runs; of one that ended badly, how."""
    status = launcher.poll(handle)
    badly = not status.running and (status.exit_code not in (0, None) or status.note)
    return status.running, launcher.failure(handle, status) if badly else None


def _lost(job: Job, error: Exception) -> str:
    return (
        f"{job.name}: for {PATIENCE:.0f} s it could not be told how it is doing ({error!r}). It was left as it is; the same "
        f"run again joins it if it still runs; its log: {job.log_file}"
    )


class _Once:
    """Says of each kind of error once that it came, with where it came from."""

    def __init__(self) -> None:
        self._said: set[tuple[str, type]] = set()

    def warn(self, error: Exception, words: str) -> None:
        if (words, type(error)) not in self._said:
            self._said.add((words, type(error)))
            log.warning("%s: %r", words, error, exc_info=None if isinstance(error, OSError) else error)
