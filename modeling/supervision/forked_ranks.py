"""The ranks of a node, forked from torchrun's process after it has imported their job module.

Ranks that start as programs of their own each import torch and the trainer: 2 s of CPU and thousands of reads. These are forked
before torchrun starts a thread or opens a connection, and wait for their environment and log files until it starts them.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from torch.distributed import run

from modeling.start import without_garbage_collection
from parallel.torch_internals import is_in_bad_fork
from profiles.files import exit_codes

START = "modeling.start"
POLL = 0.02  # seconds


class ForkedRank:
    """A rank that waits until `start`, with what torchrun calls of a `SubprocessHandler` and its `Popen`.

    Args:
        main: what the rank runs.
        earlier: the ranks that were forked before.
    """

    def __init__(self, main: Callable[[], int], earlier: list[ForkedRank]) -> None:
        self._channel, channel = Pipe()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            for rank in (self, *earlier):  # else a rank whose torchrun was killed would wait for ever
                rank._channel.close()
            _take_over(channel)
            exit_codes.leave(exit_codes.code_of(main))
        channel.close()

    def is_sound(self) -> bool:
        """Whether the rank waits in its own session, and may use CUDA: not if torchrun has used it."""
        try:
            return self._channel.recv()
        except (OSError, EOFError):  # it was killed
            return False

    def start(self, environment: Mapping[str, str], *outputs: str) -> None:
        """Let the rank run.

        Args:
            outputs: files for its standard output and error; "" for those of torchrun.
        """
        with contextlib.suppress(OSError, EOFError):  # it was killed, which `poll` tells
            self._channel.send((dict(environment), outputs))
        self._channel.close()

    @property
    def proc(self) -> ForkedRank:
        return self

    def poll(self) -> int | None:
        """The exit code, -N if signal N ended the rank; None while it runs."""
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Wait until the rank ends. Raises subprocess.TimeoutExpired."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(POLL)
        return code

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def close(self, death_sig: signal.Signals = signal.SIGTERM) -> None:
        """Signal the rank and the processes that it has started; one that waits for its start ends, too."""
        self._channel.close()
        with contextlib.suppress(ProcessLookupError):  # not yet in its own session
            os.killpg(self.pid, death_sig)


def fork_ranks(arguments: list[str]) -> list[ForkedRank]:
    """Import the job module that torchrun is to run, and fork this node's ranks.

    Returns no ranks if they have to be programs of their own: if they do not run a job module by START; if torch has loaded
    Neuron's runtime, of which it is not known whether it survives a fork; or if a thread or CUDA would be missing in the ranks.
    """
    options = run.parse_args(arguments)
    started = options.module and options.training_script == START and options.nproc_per_node.isdecimal()
    if not started or options.numa_binding or sys.platform != "linux" or "torch_neuronx" in sys.modules:
        return []
    argv = options.training_script_args
    with without_garbage_collection():
        module = import_module(argv[0])

    def main() -> int:
        sys.argv = argv
        return module.main()

    ranks: list[ForkedRank] = []
    for _ in range(int(options.nproc_per_node)):
        ranks.append(ForkedRank(main, ranks))
        # Only now: a fork ends the threads of OpenBLAS, which starts them again where it needs them.
        if not ranks[-1].is_sound() or len(os.listdir("/proc/self/task")) > 1:
            for rank in ranks:
                rank.close()
                os.waitpid(rank.pid, 0)
            return []
    return ranks


def _take_over(channel: Connection) -> None:
    """Wait for this rank's environment and files; exits if torchrun ends before."""
    try:
        with channel:
            channel.send(not is_in_bad_fork())
            environment, outputs = channel.recv()
    except (OSError, EOFError):
        os._exit(1)
    os.environ.clear()
    os.environ.update(environment)
    for stream, path in enumerate(outputs, start=1):
        if path:
            with open(path, "w") as file:
                os.dup2(file.fileno(), stream)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    Path("/proc/self/comm").write_text(f"rank {environment['RANK']}")  # as ps and top show it
