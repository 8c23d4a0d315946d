"""torchrun with an external watchdog: `python -m modeling.supervision.torchrun TORCHRUN_ARGUMENTS...`

A hung rank dumps its own stacks and exits (watchdog.py), unless its process is stopped or blocked in native code that never
releases the GIL. For such a rank, GRACE seconds after its deadline, py-spy captures the stacks into the rank's file in
RUN/logs/stacks, and the process is ended by SIGALRM or, if necessary, SIGKILL, so that the attempt ends.

It forwards SIGUSR1, on which ranks save and exit: Slurm with proctrack/cgroup signals only the task, which is torchrun, and not
the task's descendants. It forks ranks that run a job module, before it starts a thread (forked_ranks.py).
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import psutil
from torch.distributed import TCPStore, run
from torch.distributed.elastic import multiprocessing

from modeling.supervision import heartbeat
from modeling.supervision.forked_ranks import ForkedRank, fork_ranks
from modeling.supervision.stragglers import node_name
from modeling.supervision.time_account import BEGUN
from profiles.files import state_files
from profiles.files.exit_codes import HANG_MESSAGE

GRACE = 1.5  # seconds after the deadline in which a rank can dump its own stacks
POLL = 0.5  # seconds
PY_SPY_TIMEOUT = 10.0  # seconds
MAX_FILES = 65_535  # open files of a process
STOP = signal.SIGUSR1


class Ranks(multiprocessing.SubprocessContext):
    """The ranks of this node, which get each STOP signal that arrives while they run."""

    forked: ClassVar[list[ForkedRank]] = []  # which the first start lets run

    def start(self) -> None:
        # Inherited: a rank that is starting up must miss the signal, not be killed by it.
        signal.signal(STOP, signal.SIG_IGN)
        super().start()
        signal.signal(STOP, self._forward)

    def _start(self) -> None:
        ranks, Ranks.forked = Ranks.forked, []
        if not ranks:
            super()._start()
            return
        self.subprocess_handlers = dict(enumerate(ranks))  # type: ignore[arg-type]  # what is called of them
        for number, rank in enumerate(ranks):
            rank.start(os.environ | self.envs[number], self.stdouts[number], self.stderrs[number])

    def _forward(self, *_: object) -> None:
        for rank in self.subprocess_handlers.values():
            rank.proc.send_signal(STOP)  # not if the rank has ended


def main(arguments: list[str] | None = None) -> int:
    signal.signal(STOP, signal.SIG_IGN)
    # If inherited as ignored, the exit codes of ranks would be lost.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    vars(multiprocessing)["SubprocessContext"] = Ranks
    raise_file_limit()
    arguments = sys.argv[1:] if arguments is None else arguments
    Ranks.forked = fork_ranks(arguments)
    arguments, store = with_free_port(arguments)
    with tempfile.TemporaryDirectory(prefix="trainshed-") as folder:
        os.environ[heartbeat.FOLDER] = folder
        os.environ[BEGUN] = str(psutil.Process().create_time())
        thread = threading.Thread(target=watch, args=(Path(folder),), daemon=True, name="external-watchdog")
        thread.start()
        try:
            run.main(arguments)
        finally:  # at its exit, Python would restore the default, and the signal would end it with another exit code
            signal.signal(STOP, signal.SIG_IGN)
    del store
    return 0


def raise_file_limit() -> None:
    """Let this process and its ranks open as many files as they may.

    Each rank has two connections to the store for each of its process groups.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < MAX_FILES:  # negative: unlimited
        raised = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))


def with_free_port(arguments: Sequence[str]) -> tuple[list[str], TCPStore | None]:
    """Replace port 0 of a rendezvous on this machine by a free port, which other machines cannot reach.

    Its server runs as long as the returned store exists. torchrun's own store joins that server in this process, so no other
    process can take the port in between. TCPStore would listen on all interfaces, whatever its address, so it gets a socket that
    is bound. Gloo would listen on the interface of the host name: it takes the one of the rendezvous, unless the user chose one.
    """
    arguments = list(arguments)
    position = arguments.index("--master-port") + 1 if "--master-port" in arguments else 0
    if not position or arguments[position] != "0":
        return arguments, None
    address = arguments[arguments.index("--master-addr") + 1]
    listener = socket.socket()
    listener.bind((address, 0))
    listener.listen()
    port = listener.getsockname()[1]
    store = TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )
    arguments[position] = str(port)
    for interface, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    return arguments, store


def watch(folder: Path) -> None:
    """Watch the processes with a heartbeat file in a folder until the folder is removed."""
    with contextlib.suppress(FileNotFoundError):
        while True:
            for process in heartbeat.WatchedProcess.read_all(folder):
                if not _alive(process.pid):
                    process.remove(folder)
                elif time.monotonic() > process.deadline + GRACE:
                    process.remove(folder)
                    # One thread per process, since all ranks of a node may hang at once.
                    threading.Thread(target=report_and_kill, args=(process,), daemon=True).start()
            time.sleep(POLL)


def report_and_kill(process: heartbeat.WatchedProcess) -> None:
    """Write the stacks of a hung rank to its file, then end it.

    With SIGALRM if it still handles signals, so that the exit status shows a hang.
    """
    rank = process.stacks.stem.removeprefix("rank_")
    message = f"rank {rank} on {node_name()}: {HANG_MESSAGE} longer than allowed, and it dumped no stacks"
    stacks = capture_stacks(process.pid)
    with contextlib.suppress(OSError):  # a full disk must not keep the rank alive
        state_files.make_folder(process.stacks.parent)
        with process.stacks.open("a") as file:
            file.write(f"{message}; captured externally:\n{stacks}")
    print(f"[rank {rank}] warning: {message}; its stacks: {process.stacks}", flush=True)
    with contextlib.suppress(psutil.NoSuchProcess):
        hung = psutil.Process(process.pid)
        hung.send_signal(signal.SIGALRM)
        hung.resume()  # a stopped process handles the signal once it continues
        time.sleep(POLL)
        hung.kill()


def capture_stacks(pid: int) -> str:
    """py-spy's stacks of a process, or why there are none."""
    scripts = os.pathsep.join((sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)))
    py_spy = shutil.which("py-spy", path=scripts)
    if py_spy is None:
        return "py-spy is not installed\n"
    output = ""
    # --native includes native frames but pauses the process, which fails if it is stopped already.
    for option in "--native", "--nonblocking":
        try:
            command = [py_spy, "dump", "--pid", str(pid), option]
            result = subprocess.run(
                command, timeout=PY_SPY_TIMEOUT, capture_output=True, text=True, errors="replace"
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            output = f"{error}\n"
            continue
        if result.returncode == 0:
            return result.stdout
        output = result.stdout + result.stderr
    return output


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


if __name__ == "__main__":
    sys.exit(main())
