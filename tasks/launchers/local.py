"""Local launcher: torchrun (or plain Python) in its own session, logging into the job's folder.

- Jobs write to files: a child that inherits the flow's stdout would make a Prefect worker take a dead flow for a running one.
- torchrun starts each rank in a separate session, so no process group contains the whole job. Every process of a job carries
  its identifier in the environment variable MARKER, by which it is found and killed even if torchrun died.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from functools import partial

import psutil

from profiles.files import state_files
from tasks.launchers import causes
from tasks.launchers.base import (
    HANDLE,
    Handle,
    Job,
    JobFailed,
    Status,
    job_environment,
    next_attempt,
    torchrun,
    write_handle,
)
from tasks.launchers.environment import job_variables, log_differences

MARKER = "TRAINSHED_JOB"
KILLED_WAIT = 5.0  # seconds that killed processes have to end before a cancellation returns


class LocalLauncher:
    """Starts jobs on this machine.

    Args:
        environment: variables for jobs; this process's own take precedence.
        fixed: variables that take precedence over those; a job does not have one whose value is "".
        grace: seconds to save, for ranks that torchrun ends on a stop signal and for a job that another one replaces.
    """

    def __init__(
        self,
        environment: Mapping[str, str] | None = None,
        grace: int = 30,
        *,
        fixed: Mapping[str, str] | None = None,
    ) -> None:
        self._environment, self._grace, self._fixed = dict(environment or {}), grace, dict(fixed or {})
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def submit(self, job: Job) -> Handle:
        """Start the job without a terminal. Raises ValueError for several nodes or a job array."""
        if job.nodes != 1:
            raise ValueError(f"cluster.nodes = {job.nodes}: the local launcher has one node; valid: 1")
        if job.array:
            raise ValueError(f"{job.name}: the local launcher does not run job arrays")
        state_files.retried(partial(state_files.make_folder, job.folder))
        if previous := _read_handle(job):
            self.cancel(previous, self._grace)
        log_differences(job.name, self._environment, os.environ)
        identifier = uuid.uuid4().hex
        attempt = ("--attempt", str(next_attempt(job.attempt_file))) if job.attempt_file else ()
        arguments = command(job.with_arguments(*attempt), self._grace)
        with job.log_file.open("ab") as output:
            handle = Handle(job, identifier, output.tell())
            # Before the job starts: whatever interrupts this process, the next one finds the job's processes.
            write_handle(handle)
            child = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._variables(job, identifier),
                start_new_session=True,
            )
        self._children[identifier] = child
        _wait_until_marked(child, identifier)
        return handle

    def _variables(self, job: Job, identifier: str) -> dict[str, str]:
        own = {**job_environment(), **dict(job.secrets), **job_variables(job), MARKER: identifier}
        found = self._environment | own | self._fixed
        return {name: value for name, value in found.items() if value or name not in self._fixed}

    def find(self, job: Job) -> Handle | None:
        handle, state = _read_handle(job), state_files.read_json(job.handle_file) or {}
        if handle is None or state.get("job") != job.signature:
            return None
        child = self._children.get(handle.identifier)
        started = child is not None and child.poll() is None  # perhaps just now, not yet marked
        return handle if started or _processes(handle.identifier) else None

    def poll(self, handle: Handle) -> Status:
        child = self._children.get(handle.identifier)
        if child is None:  # another process's child, so its exit code is unknown
            return Status(running=bool(_processes(handle.identifier)))
        code = child.poll()
        if code is None:
            return Status(running=True)
        _signal_all(handle.identifier, signal.SIGKILL)  # ranks outlive a torchrun that was killed
        return Status(running=False, exit_code=code)

    def location(self, handle: Handle) -> str:
        pids = [str(process.pid) for process in _processes(handle.identifier)]
        return f"process {', '.join(pids)}" if pids else ""

    def cancel(self, handle: Handle, grace: float) -> None:
        child = self._children.get(handle.identifier)
        try:
            if child is not None and child.poll() is None:
                child.terminate()  # torchrun forwards SIGTERM to its ranks and waits for them
            else:
                _signal_all(handle.identifier, signal.SIGTERM)
            deadline = time.monotonic() + grace
            while _processes(handle.identifier) and time.monotonic() < deadline:
                if child is not None:
                    child.poll()  # reaps it
                time.sleep(0.1)
        finally:  # also if a second Ctrl-C interrupts the wait
            killed = _signal_all(handle.identifier, signal.SIGKILL)
            if child is not None:
                child.wait()
            deadline = time.monotonic() + KILLED_WAIT  # a killed process may take a moment to end
            while any(map(_is_alive, killed)) and time.monotonic() < deadline:
                time.sleep(0.01)

    def failure(self, handle: Handle, status: Status) -> JobFailed:
        return causes.job_failure(handle, status)


def _read_handle(job: Job) -> Handle | None:
    """Handle of the latest job of this name and folder, whatever it ran."""
    state = state_files.read_json(job.handle_file, HANDLE, HANDLE)
    return Handle(job, state["identifier"], state["log_start"]) if state else None


def command(job: Job, grace: int) -> list[str]:
    """Arguments of the process that runs a job: torchrun, unless it is a plain process."""
    program = ["-m", *job.module, *job.arguments]
    if job.processes == 0:
        return [sys.executable, *program]
    # Port 0: our torchrun takes a free one. A static rendezvous: the c10d one prints a stack dump on shutdown.
    rendezvous = ("--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", "0")
    return [sys.executable, *torchrun(job, grace, *rendezvous), *program]


def _processes(identifier: str) -> list[psutil.Process]:
    """All live processes of a job, including orphans."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if _is_marked(process, identifier) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _is_marked(process: psutil.Process, identifier: str) -> bool:
    return process.environ().get(MARKER) == identifier


def _wait_until_marked(child: subprocess.Popen[bytes], identifier: str) -> None:
    """Wait until a new process can be found: on a busy machine, its environment briefly reads as empty."""
    while child.poll() is None:
        with contextlib.suppress(psutil.Error, OSError):
            if _is_marked(psutil.Process(child.pid), identifier):
                return
        time.sleep(0.001)


def _is_alive(process: psutil.Process) -> bool:
    """Whether a process still runs; one that ends has no environment while it releases its memory."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _signal_all(identifier: str, number: signal.Signals) -> list[psutil.Process]:
    """Signal all live processes of a job; returns them."""
    found = _processes(identifier)
    for process in found:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)
    return found
