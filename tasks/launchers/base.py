"""The `Launcher` protocol, its job types, and `execute`, which runs one job to completion.

A job is a Python module that runs on the devices. Its log and the launcher's state files are kept in the job's folder, so that a
new orchestrator process can find a running job and re-attach to it.

To add a launcher, implement `Launcher` and name it by an entry point (plugins.py); conformance.py tests this contract:

- `submit` returns at once. The job writes stdout and stderr to `job.log_file`, appending, each line of a rank prefixed with
  "[rank N] ". `job.handle_file` gets JSON with at least {"identifier": ..., "log_start": ...}.
- The job runs in the current folder with `job_environment()` and `job.secrets`; secrets are written to no file.
- With `job.attempt_file`, every start (also a requeue) increments the number in that file and passes it as --attempt.
- A job outlives the process that submitted it: `find` returns it to a process that never saw the handle.
- A file or server that cannot be read is an exception (`execute` retries), never evidence that the job has ended.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from profiles.files import state_files
from profiles.files.retry_policies import STATUS

log = logging.getLogger(__name__)

POLL = STATUS.delays[0]  # seconds between queries of a job's status
STATUS_TIMEOUT = STATUS.seconds  # seconds without a job's status until `execute` gives up watching
# Of environment variables: Prefect's, tokens, and the mode in which a job only compiles.
WITHHELD_PREFIXES = ("PREFECT_", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "TORCH_NEURONX_COMPILE_ONLY")
NODE_FAILED = "its node failed"  # in the note of a job that lost a node
# Without it, `python -m` would import a user's tasks.py in the working folder instead of ours.
SAFE_PATH = {"PYTHONSAFEPATH": "1"}
START = "modeling.start"  # runs a module, with a faster start
TORCHRUN = "modeling.supervision.torchrun"
HANDLE = {"identifier": str, "log_start": int}  # of a job's handle file, with their types


@dataclass(frozen=True)
class Job:
    """`python -m program arguments`: `nodes` × `processes` ranks, or a plain process if `processes` is 0."""

    name: str  # unique within the folder; names the log and the state files
    program: str  # the job module
    arguments: tuple[str, ...]
    folder: Path  # of the log and the state files
    nodes: int = 1
    processes: int = 0  # ranks per node, started by torchrun; 0: one process without torchrun
    threads: int | None = None  # OMP_NUM_THREADS of each process; None keeps the environment's
    key: str = ""  # distinguishes jobs of the same name and folder on a cluster, e.g. the run's cache key
    run: str = ""  # name of the run that it belongs to, for its name on the cluster; "" if it belongs to none
    array: int = 0  # size of a job array, whose jobs get --index 0 to array - 1; 0: no array
    # Counts the job's starts; the number is passed as --attempt. A job with this file saves a checkpoint when it is asked to
    # stop, and is requeued at its time limit.
    attempt_file: Path | None = None
    # Environment variables that are written to no file.
    secrets: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    def with_arguments(self, *arguments: str) -> Job:
        return replace(self, arguments=(*self.arguments, *arguments))

    @property
    def module(self) -> list[str]:
        """The arguments of `python -m` that run the job module."""
        return [START, self.program] if self.program.startswith("modeling.") else [self.program]

    @property
    def title(self) -> str:
        """What to call the job on a cluster: ts-RUN-JOB."""
        return "-".join(filter(None, ("ts", self.run, self.name)))

    @property
    def log_file(self) -> Path:
        return self.folder / f"{self.name}.log"

    @property
    def handle_file(self) -> Path:
        """JSON file with the handle of the job of this name that was submitted last."""
        return self.folder / f"{self.name}.job.json"

    @property
    def signature(self) -> list[object]:
        """JSON value that is equal for jobs that run the same command on the same number of ranks."""
        return [self.program, list(self.arguments), self.nodes, self.processes, self.array]

    @property
    def fingerprint(self) -> str:
        """Hash of `signature`, short enough for a job's comment or annotation."""
        return hashlib.sha256(json.dumps(self.signature).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Handle:
    """A submitted job."""

    job: Job
    # The launcher's name for this submission: a Slurm job number, or a UUID of the local launcher.
    identifier: str
    log_start: int = 0  # size of the log in bytes when the job was submitted; later bytes are its own


@dataclass(frozen=True)
class Status:
    """State of a job."""

    running: bool  # queued jobs count as running
    # None while the job runs, or if its exit code is unknown.
    exit_code: int | None = None
    # How the job ended if there is no exit code, e.g. "Slurm ended job 7 at its time limit"; a job with a note has failed.
    note: str = ""
    pending: bool = False  # whether the job waits in a queue; False too if the launcher cannot tell
    # Name and reason of what has happened since the last poll, for the run's events.jsonl.
    event: tuple[str, str] | None = None


class JobFailed(RuntimeError):
    """A job failed; the message has the cause and the path of its log."""

    def __init__(self, message: str, detail: str = "", exit_code: int | None = None) -> None:
        super().__init__(message)
        self.detail = detail  # the last relevant log lines
        if detail:
            self.add_note(detail)  # shown by tracebacks
        self.exit_code = exit_code  # of the rank that failed first if known, else of the job


class Unavailable(JobFailed):
    """The cluster or the storage did not answer: an outage, after which a retry may succeed."""


def job_environment() -> dict[str, str]:
    """This process's environment without WITHHELD_PREFIXES, and with SAFE_PATH."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(WITHHELD_PREFIXES)}
    return {**inherited, **SAFE_PATH}


def torchrun(job: Job, grace: int, *rendezvous: str) -> list[str]:
    """Arguments of Python that run the following ones as a module on each of the job's ranks.

    Args:
        grace: seconds to save, for ranks that torchrun ends on a stop signal.
    """
    return [
        *("-m", START, TORCHRUN, "--nnodes", str(job.nodes), "--nproc-per-node", str(job.processes)),
        *(*rendezvous, "--max-restarts", "0", "--shutdown-timeout", str(grace)),
        *("--tee", "3", "--log-dir", str(job.folder.absolute() / "ranks")),
    ]


def write_handle(handle: Handle) -> None:
    """Write the handle file of a job."""
    job = handle.job
    state = {"identifier": handle.identifier, "log_start": handle.log_start, "job": job.signature}
    state_files.write(job.handle_file, json.dumps(state, indent=1))


def next_attempt(attempt_file: Path) -> int:
    """Increment the attempt number, which fences earlier attempts that are still running somewhere.

    If the file is corrupted, numbers continue from the Unix time, which exceeds every earlier number.
    """
    text = state_files.read_text(attempt_file)
    number = 1
    if text is not None:
        if not text.strip().isdecimal():
            reason = "corrupted: %r is not a number; attempt numbers continue from the Unix time"
            log.warning(f"%s: {reason}", attempt_file, text)
            text = str(int(time.time()))
        number = int(text) + 1
    state_files.write(attempt_file, str(number))
    return number


class Launcher(Protocol):
    """Starts jobs on this machine or a cluster, re-attaches to them and reports their status.

    The contract is that of the module's docstring.
    """

    def submit(self, job: Job) -> Handle:
        """Start or queue the job and return at once.

        A running job of the same name and folder but another signature is cancelled first: two jobs must not write to one folder.
        """

    def find(self, job: Job) -> Handle | None:
        """The running job of this name, folder and signature, to re-attach to; None if there is none."""

    def poll(self, handle: Handle) -> Status:
        """The job's status; cheap enough to be called several times a second."""

    def location(self, handle: Handle) -> str:
        """Where a user finds the running job, e.g. "Slurm job 12" or "process 4711"; "" if it has ended."""

    def cancel(self, handle: Handle, grace: float) -> None:
        """Stop the job: signal it, wait up to `grace` seconds for a last checkpoint, then kill every process."""

    def failure(self, handle: Handle, status: Status) -> JobFailed:
        """Exception for a job of this status: "rank 1 on n2 was killed by SIGKILL", and its last lines."""


def execute(
    launcher: Launcher,
    job: Job,
    watch: Callable[[], None] = lambda: None,
    *,
    timeout: float | None = None,
    grace: float = 30.0,
    on_submit: Callable[[], None] = lambda: None,
    on_status: Callable[[Status], None] = lambda status: None,
) -> None:
    """Run a job to completion, or re-attach to it if it is already running.

    Ctrl-C or a cancelled flow (a BaseException other than Exception) cancels the job. Any other error leaves it running: polling
    is retried for STATUS_TIMEOUT seconds, an error of `watch` is logged.

    Args:
        watch: called after every poll, e.g. to show progress.
        timeout: seconds after which the job is cancelled.
        grace: seconds a cancelled job has to save a checkpoint.
        on_submit: called before the job is submitted, if it is not running already.
        on_status: called with each status.

    Raises:
        JobFailed: the job ended with an exit code other than 0.
        Unavailable: its status was unknown for STATUS_TIMEOUT.
        TimeoutError: the job exceeded `timeout` and was cancelled.
    """
    handle = launcher.find(job)
    warned: set[tuple[str, type]] = set()

    def warn_once(message: str, error: Exception) -> None:
        """Log each kind of warning once, with a traceback unless it is an OSError."""
        if (message, type(error)) not in warned:
            warned.add((message, type(error)))
            trace = None if isinstance(error, OSError) else error
            log.warning("%s: %s: %r", job.name, message, error, exc_info=trace)

    try:
        if handle is not None:
            log.warning("%s is already running: re-attached to it", job.name)
        else:
            on_submit()
            handle = launcher.submit(job)
        start = last_known = time.monotonic()
        while True:
            failure: JobFailed | None = None
            try:
                status = launcher.poll(handle)
                on_status(status)
                running = status.running
                if not running and (status.exit_code not in (0, None) or status.note):
                    failure = launcher.failure(handle, status)
                last_known = time.monotonic()
            except Exception as error:
                running = True
                warn_once("cannot get the job's status; retrying", error)
                if time.monotonic() - last_known > STATUS_TIMEOUT:
                    raise Unavailable(
                        f"{job.name}: no status for {STATUS_TIMEOUT:.0f} s ({error!r}), job left running; "
                        f"start the same run again to re-attach; log: {job.log_file}"
                    ) from error
            try:
                watch()
            except Exception as error:
                warn_once("cannot show its progress; the job keeps running", error)
            if failure is not None:
                raise failure
            if not running:
                return
            if timeout is not None and time.monotonic() - start > timeout:
                launcher.cancel(handle, grace)
                raise TimeoutError(f"{job.name}: exceeded {timeout:.0f} s, stopped; log: {job.log_file}")
            time.sleep(POLL)
    except BaseException as error:
        if not isinstance(error, Exception):
            try:
                _stop(launcher, job, handle, grace)
            except Exception as failure:  # must not replace the interruption
                log.warning("%s could not be stopped: %r", job.name, failure)
        raise


def _stop(launcher: Launcher, job: Job, handle: Handle | None, grace: float) -> None:
    """Cancel a job; without a handle, it may be running if its submission was interrupted."""
    if handle := handle or launcher.find(job):
        saves = "; saving a last checkpoint may take a moment" if job.attempt_file else ""
        log.warning("stopping %s%s", job.name, saves)
        launcher.cancel(handle, grace)
