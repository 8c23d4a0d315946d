"""Prefect server shared by commands on one store if none is configured; its database is in the store.

The first command starts it, in about 3 s (10 s the first time, when it creates its database) while the flow is being imported.
Others use it, since servers that share an SQLite database block each other. It exits after its last user, even a killed one.
It runs in its own session: Ctrl-C reaches only the flow, which can then still report its end.

Prefect's own servers end otherwise: its temporary one with the process that started it, so that each command would have another,
and that of `prefect server start --background` when somebody stops it.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypedDict, Unpack

from flows.server.locks import ServerLocks
from flows.server.prefect_settings import access_settings, cors_setting
from flows.server.secrets import without_tokens
from flows.server.serve import SHARED
from profiles.files import state_files

SERVE = "flows.server.serve"  # the module of the server's process
START_TIMEOUT = 1800.0  # seconds; a server that exits is noticed at once, and a busy machine may take minutes
STOP_TIMEOUT = 10.0  # seconds
WATCH_SECONDS = 2.0  # between a command's checks that its server was not killed
UP_SECONDS = 20.0  # for `trainshed up` to start its server again before a command that uses it does


@contextlib.contextmanager
def shared_server(home: Path, log_file: Path) -> Iterator[Server]:
    """Use the server of this home for the block; starts one if there is none, and again if it is killed."""
    server, ended = Server(home, log_file), threading.Event()

    def watch() -> None:
        while not ended.wait(WATCH_SECONDS):
            # Such as of a file system that does not answer, or of a taken port.
            with contextlib.suppress(OSError):
                server.keep_running()

    thread = threading.Thread(target=watch, daemon=True, name="prefect-server")
    thread.start()
    try:
        yield server
    finally:
        ended.set()
        thread.join()
        server.leave()


class Server:
    """The server of a home, for one of its users; `wait` returns its address.

    Attributes:
        started: whether this user started it.
        access: Prefect's settings for its clients, with the password of its API.
    """

    def __init__(self, home: Path, log_file: Path) -> None:
        self._locks, self._log_file = ServerLocks(home), log_file
        with self._locks.locked():
            joined = self._locks.join()
            self.started = joined is None
            if joined is None:
                state_files.make_folder(log_file.parent)
                start_server(self._locks, SHARED, 0, log_file)
                joined = self._locks.join()
            self.access = access_settings(self._locks.home)
        assert joined is not None  # it was just started
        self.port, self._users = joined
        self._seen = time.monotonic()  # when the server was last known to run

    def wait(self) -> str:
        """Wait for a healthy server; returns its API's address. Raises RuntimeError after START_TIMEOUT."""
        address = f"http://127.0.0.1:{self.port}/api"
        if not wait_healthy(address, lambda: self._locks.is_alive(self.port)):
            raise RuntimeError(f"the Prefect server did not start; log: {self._log_file}")
        return address

    def keep_running(self) -> None:
        """Start the server again, at the same address, if it was killed; waits for nothing.

        That of `trainshed up`, which does so itself, only after UP_SECONDS: without `up`, too.
        """
        with self._locks.locked():
            if self._locks.is_alive(self.port) or self._locks.has_another(self.port):
                self._seen = time.monotonic()
                return
            missed = time.monotonic() - self._seen
            if self._locks.ends_with_users(self.port) or missed > UP_SECONDS:
                start_server(self._locks, SHARED, self.port, self._log_file)

    def leave(self) -> None:
        """Stop using the server; wait for its exit if it ends with its users and this was the last one."""
        self._users.close()
        deadline = time.monotonic() + STOP_TIMEOUT
        while self._locks.is_alive(self.port):
            if self._locks.is_used(self.port) or not self._locks.ends_with_users(self.port):
                return
            if time.monotonic() > deadline:
                return
            time.sleep(0.05)
        self._locks.remove(self.port)


def start_server(locks: ServerLocks, kind: str, port: int, log_file: Path) -> subprocess.Popen[bytes]:
    """Start the server of a home, whose lock is held, on a port of loopback; 0: any free one.

    The port is bound here, so that no other process can take it meanwhile. Raises OSError if it is taken.
    """
    home = str(locks.home)
    environment = {**without_tokens(), "PREFECT_HOME": home, **access_settings(locks.home)}
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        port = listener.getsockname()[1]
        with locks.record_server(port, ends_with_users=kind == SHARED) as alive:
            fds = [alive.fileno(), listener.fileno()]
            options: ProcessOptions = {
                "stdin": subprocess.DEVNULL,
                "pass_fds": fds,
                "env": environment | cors_setting(port),
            }
            return start_module((SERVE, str(listener.fileno()), home, kind), log_file, **options)


class ProcessOptions(TypedDict, total=False):
    """Arguments of `subprocess.Popen`."""

    stdin: int
    pass_fds: Collection[int]
    env: Mapping[str, str]
    cwd: Path


def start_module(
    module: Sequence[str], log_file: Path, **options: Unpack[ProcessOptions]
) -> subprocess.Popen[bytes]:
    """Start `python -m MODULE ARGUMENTS...` in a new session, with its output appended to the log file."""
    command = [sys.executable, "-P", "-m", *module]
    with log_file.open("ab") as output:
        return subprocess.Popen(
            command, start_new_session=True, stdout=output, stderr=subprocess.STDOUT, **options
        )


def wait_healthy(api: str, is_alive: Callable[[], bool]) -> bool:
    """Wait until the API is healthy; False after START_TIMEOUT or if the server exits first."""
    deadline = time.monotonic() + START_TIMEOUT
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while time.monotonic() < deadline and is_alive():
        with contextlib.suppress(OSError), direct.open(f"{api}/health", timeout=5):
            return True
        time.sleep(0.05)
    return False
