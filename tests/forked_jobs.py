"""Local jobs whose ranks are forked from a process with torch imported, not started by torchrun.

    with forked_jobs(): pretrain(...)

Starting torchrun, which imports torch and the trainer, takes 2 s of CPU, more than training a small model. The rest of the
launcher is real: records, attempts, environment, logs. Tests of failures and interrupts use torchrun.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import IO, Any
from unittest import mock

from profiles.files import exit_codes
from tasks.launchers.base import START, TORCHRUN
from tests.forkserver import forkserver
from tests.ports import free_port


@contextlib.contextmanager
def forked_jobs(real: str | None = None) -> Iterator[None]:
    """Fork the ranks of LocalLauncher's jobs inside the block, except those of the module `real`."""
    from tasks.launchers import local

    wait_until_marked = local._wait_until_marked

    def start(command: list[str], **options: Any) -> ForkedJob | subprocess.Popen[bytes]:
        kind = subprocess.Popen if _parse(command)[1] == real else ForkedJob
        return kind(command, **options)

    def wait(child: ForkedJob | subprocess.Popen[bytes], identifier: str) -> None:
        # The environment in /proc of a forked rank is that of the process it was forked from.
        if not isinstance(child, ForkedJob):
            wait_until_marked(child, identifier)

    replaced = SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL, STDOUT=subprocess.STDOUT)
    with (
        mock.patch.object(local, "subprocess", replaced),
        mock.patch.object(local, "_wait_until_marked", wait),
    ):
        yield


def run_forked(
    program: str, arguments: Sequence[object], ranks: int, timeout: float = 600
) -> tuple[int, str]:
    """Run `python -m program arguments` on forked ranks until it ends; returns its exit code and output."""
    torchrun = ["-m", TORCHRUN, "--nproc-per-node", str(ranks)] if ranks else []
    with tempfile.NamedTemporaryFile() as log:
        job = ForkedJob([*torchrun, "-m", program, *map(str, arguments)], stdout=log, env=dict(os.environ))
        deadline = time.monotonic() + timeout
        while (code := job.poll()) is None:
            if time.monotonic() > deadline:
                job.kill()
                job.wait()
                raise TimeoutError(
                    f"{program} took longer than {timeout:g} s:\n{log.read().decode()[-4000:]}"
                )
            time.sleep(0.02)
        return code, log.read().decode()


class ForkedJob:
    """Subset of Popen that LocalLauncher uses, for `python -m torchrun ...` and `python -m program ...`."""

    def __init__(self, command: list[str], *, stdout: IO[bytes], env: dict[str, str], **_: object) -> None:
        ranks, program, arguments = _parse(command)
        port = free_port()
        self._processes = []
        self._failure = 0  # exit code of the first rank that failed
        for rank in range(max(1, ranks)):
            extra = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            extra |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            environment = {**env, **({name: str(value) for name, value in extra.items()} if ranks else {})}
            prefix = f"[rank {rank}] " if ranks else ""
            call = (program, arguments, environment, os.getcwd(), stdout.name, prefix)
            self._processes.append(forkserver().Process(target=_main, args=call, daemon=True))
        for process in self._processes:
            process.start()

    def poll(self) -> int | None:
        """Return the exit code once all ranks have ended. Ranks that outlive a failed one are killed."""
        codes = [process.exitcode for process in self._processes]
        self._failure = self._failure or next((code for code in codes if code), 0)
        if None not in codes:
            return self._failure
        if self._failure:
            self.kill()
        return None

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def wait(self) -> int | None:
        for process in self._processes:
            process.join()
        return self.poll()

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process.exitcode is None:
                with contextlib.suppress(ProcessLookupError):  # has ended; its exit code is not known yet
                    os.kill(process.pid, number)


def _parse(command: list[str]) -> tuple[int, str, list[str]]:
    """Ranks (0: one process, no torch.distributed), program and arguments of a launcher's command."""
    command = [part for part in command if part != START]
    first = command.index("-m") + 1
    if command[first] != TORCHRUN:
        return 0, command[first], command[first + 1 :]
    ranks = int(command[command.index("--nproc-per-node") + 1])
    program = command.index("-m", first) + 1
    return ranks, command[program], command[program + 1 :]


def _main(
    program: str, arguments: list[str], environment: dict[str, str], folder: str, log: str, prefix: str
) -> None:
    """Run `python -m program arguments` in this forked process, and append its output to the log."""
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.argv = [program, *arguments]
    sys.stdout = sys.stderr = _Log(prefix)
    logging.getLogger().handlers.clear()  # those of the process that this one was forked from
    main = importlib.import_module(program).main
    sys.exit(exit_codes.code_of(lambda: main(arguments)))  # as modeling.start


class _Log:
    """Standard output as torchrun's --tee writes it: each line in one write, after the rank's prefix."""

    def __init__(self, prefix: str) -> None:
        self._prefix, self._line = prefix, ""

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            os.write(1, f"{self._prefix}{line}\n".encode())
        return len(text)

    def flush(self) -> None:
        """Does nothing: complete lines are written immediately."""

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return 1
