"""Jobs on this machine: torchrun (or plain Python) in a session of its own, logging into the job's folder.

Two facts shape this file. A child that holds the flow's standard output keeps a dead flow alive in a worker's eyes, so
children write to files. And torchrun starts every rank in a session of its own, so that no process group holds them
all: each process of a job carries the job's identifier in its environment, by which the job is found and ended whole,
even if torchrun itself was killed.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import psutil

from tasks.launchers import base, causes
from tasks.launchers.base import Handle, Job, JobFailed, Status

MARKER = "TRAINSHED_JOB"


class LocalLauncher:
    def __init__(self) -> None:
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def submit(self, job: Job) -> Handle:
        """Start the job with no terminal, its output appended to its log; ValueError for more than one node."""
        if job.nodes != 1:
            raise ValueError(f"cluster.nodes = {job.nodes}: the local launcher has one node; valid: 1")
        if job.array:
            raise ValueError(f"{job.name}: the local launcher runs no arrays of jobs")
        job.folder.mkdir(parents=True, exist_ok=True)
        other = _noted(job)
        if other is not None:  # of the same name, but not the same: two must not write into one folder
            self.cancel(other, grace=30)
        identifier = uuid.uuid4().hex
        command = _command(
            job if job.attempt_file is None else job.with_arguments("--attempt", str(_next(job.attempt_file)))
        )
        with job.log_file.open("ab") as output:
            start = output.tell()
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment(job, identifier),
                start_new_session=True,
            )
        self._children[identifier] = child
        handle = Handle(job, identifier, start)
        note = {"identifier": identifier, "log_start": start, "job": job.essence}
        try:
            _write_atomically(job.note_file, json.dumps(note, indent=1))
        except BaseException:
            self.cancel(handle, grace=0)
            raise
        return handle

    def find(self, job: Job) -> Handle | None:
        handle = _noted(job)
        if handle is None or json.loads(job.note_file.read_text()).get("job") != job.essence:
            return None
        return handle if _processes(handle.identifier) else None

    def poll(self, handle: Handle) -> Status:
        child = self._children.get(handle.identifier)
        if child is None:  # started by an orchestrator that is gone: its exit code went with it
            return Status(running=bool(_processes(handle.identifier)))
        code = child.poll()
        if code is None:
            return Status(running=True)
        _end(handle.identifier, signal.SIGKILL)  # ranks that outlived a torchrun that was killed
        return Status(running=False, exit_code=code)

    def location(self, handle: Handle) -> str:
        pids = [str(process.pid) for process in _processes(handle.identifier)]
        return f"process {', '.join(pids)}" if pids else ""

    def tail(self, handle: Handle, lines: int) -> Sequence[str]:
        return causes.last_lines(causes.attempt_log(handle), lines)

    def failure(self, handle: Handle, status: Status) -> JobFailed:
        return causes.failure(handle, status)

    def cancel(self, handle: Handle, grace: float) -> None:
        child = self._children.get(handle.identifier)
        try:
            if child is not None and child.poll() is None:
                child.terminate()  # torchrun passes it on to its ranks, and waits for them
            else:
                _end(handle.identifier, signal.SIGTERM)
            deadline = time.monotonic() + grace
            while _processes(handle.identifier) and time.monotonic() < deadline:
                if child is not None:
                    child.poll()  # reaps it
                time.sleep(0.1)
        finally:  # also when a second Ctrl-C cuts the grace short
            _end(handle.identifier, signal.SIGKILL)
            if child is not None:
                child.wait()


def _noted(job: Job) -> Handle | None:
    """The job that was started last under this name in this folder."""
    try:
        note = json.loads(job.note_file.read_text())
    except FileNotFoundError:
        return None
    return Handle(job, note["identifier"], note["log_start"])


def _command(job: Job) -> list[str]:
    program = ["-m", job.program, *job.arguments]
    if job.processes == 0:
        return [sys.executable, *program]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # A static rendezvous: c10d's prints a stack dump when it shuts down.
    torchrun = [
        *(sys.executable, "-m", "modeling.training.torchrun", "--nnodes", "1", "--node-rank", "0"),
        *("--nproc-per-node", str(job.processes), "--master-addr", "127.0.0.1", "--master-port", str(port)),
        *("--max-restarts", "0", "--tee", "3", "--log-dir", str(job.folder / "ranks")),
    ]
    return [*torchrun, *program]


def _next(attempts: Path) -> int:
    """Count one start more; an earlier one that lives on somewhere is told from it by its number."""
    number = int(attempts.read_text()) + 1 if attempts.exists() else 1
    _write_atomically(attempts, str(number))
    return number


def _environment(job: Job, identifier: str) -> dict[str, str]:
    environment = {
        **base.environment(),
        **dict(job.secrets),
        MARKER: identifier,
        "PYTHONUNBUFFERED": "1",
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": causes.PREFIX,
    }
    if job.threads is not None:
        environment["OMP_NUM_THREADS"] = str(job.threads)
    return environment


def _processes(identifier: str) -> list[psutil.Process]:
    """Every live process of a job, whoever its parent is now."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARKER) == identifier and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _end(identifier: str, number: signal.Signals) -> None:
    for process in _processes(identifier):
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


def _write_atomically(path: Path, text: str) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(path)
