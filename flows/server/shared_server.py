"""Prefect server shared by commands on one store if none is configured; its database is in the store.

The first command starts it, in about 3 s (10 s the first time, when it creates its database) while the flow is being imported.
Others use it, since servers that share an SQLite database block each other. It exits after its last user, even a killed one.
It runs in its own session: Ctrl-C reaches only the flow, which can then still report its end.

    <home>/server.json          the server's port and host
    <home>/server.lock          held to start, join or end a server
    <home>/server-<port>.alive  held by the server
    <home>/server-<port>.users  held in shared mode by the commands that use it
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from flows.server.prefect_settings import PRIVATE, cors_setting
from flows.server.secrets import without_tokens
from modeling.start import without_garbage_collection
from profiles import file_locks, state_files
from profiles.errors import ProfileError

START_TIMEOUT = 120.0  # seconds
STOP_TIMEOUT = 10.0  # seconds
CHECK_SECONDS = 0.1  # between the server's checks for users


class ServerLocks:
    """A Prefect home's server and its users, tracked by file locks. Raises ProfileError if locking fails."""

    def __init__(self, home: Path) -> None:
        self.home = home
        try:
            self.home.mkdir(PRIVATE, parents=True, exist_ok=True)
            server = self._read()
            if server and server["host"] != platform.node():  # this machine cannot reach its loopback
                self.home = home / platform.node()
                self.home.mkdir(PRIVATE, exist_ok=True)
            with self.locked():
                pass
        except OSError as error:
            reason = f"cannot keep Prefect's database: {error.strerror}; set it to a folder on a local disk"
            raise ProfileError("PREFECT_HOME", str(home), reason) from error

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """Hold the lock of the home for a block."""
        return file_locks.locked(self.home / "server.lock")

    def record_server(self, port: int, *, ends_with_users: bool) -> IO[bytes]:
        """Record the server of this home; returns a locked file for the server to inherit."""
        alive = self._file(port, "alive").open(file_locks.MODE)
        fcntl.flock(alive, fcntl.LOCK_EX)
        server = {"port": port, "host": platform.node(), "ends_with_users": ends_with_users}
        state_files.write(self.home / "server.json", json.dumps(server))
        return alive

    def join(self) -> tuple[int, IO[bytes]] | None:
        """Become a user of the server. Returns its port and a file to close when done; None if not running."""
        server = self._read()
        if server is None or not self.is_alive(server["port"]):
            return None
        users = self._file(server["port"], "users").open(file_locks.MODE)
        fcntl.flock(users, fcntl.LOCK_SH)
        return server["port"], users

    def is_alive(self, port: int) -> bool:
        return _is_locked(self._file(port, "alive"))

    def is_used(self, port: int) -> bool:
        return _is_locked(self._file(port, "users"))

    def ends_with_users(self, port: int) -> bool:
        """Whether a server ends after its last user, or has ended; not that of `trainshed up`."""
        server = self._read()
        return server is None or server["port"] != port or server.get("ends_with_users", True)

    def close(self, port: int) -> None:
        """Stop accepting users of the server."""
        server = self._read()
        if server and server["port"] == port:
            (self.home / "server.json").unlink()

    def remove(self, port: int) -> None:
        """Remove the files of a server that has exited."""
        for kind in "alive", "users":
            self._file(port, kind).unlink(missing_ok=True)

    def _read(self) -> dict[str, Any] | None:
        return state_files.read_json(self.home / "server.json")

    def _file(self, port: int, kind: str) -> Path:
        return self.home / f"server-{port}.{kind}"


@contextlib.contextmanager
def shared_server(home: Path, log_file: Path) -> Iterator[Server]:
    """Use the server of this home for the block; starts one if there is none."""
    server = Server(home, log_file)
    try:
        yield server
    finally:
        server.leave()


class Server:
    """The server of a home, for one of its users; `wait` returns its address.

    Attributes:
        started: whether this user started it.
    """

    def __init__(self, home: Path, log_file: Path) -> None:
        self._locks, self._log_file = ServerLocks(home), log_file
        with self._locks.locked():
            joined = self._locks.join()
            self.started = joined is None
            if joined is None:
                self._start()
                joined = self._locks.join()
        self.port, self._users = joined

    def _start(self) -> None:
        """Start the server on a free port, bound here so that no other process can take it meanwhile."""
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        home = str(self._locks.home)
        environment = {**without_tokens(), "PREFECT_HOME": home}
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            with self._locks.record_server(listener.getsockname()[1], ends_with_users=True) as alive:
                fds = [alive.fileno(), listener.fileno()]
                options = {"stdin": subprocess.DEVNULL, "pass_fds": fds, "env": environment}
                module = ("flows.server.shared_server", str(listener.fileno()), home)
                start_module(module, self._log_file, **options)

    def wait(self) -> str:
        """Wait for a healthy server; returns its API's address. Raises RuntimeError after START_TIMEOUT."""
        address = f"http://127.0.0.1:{self.port}/api"
        if not wait_healthy(address, lambda: self._locks.is_alive(self.port)):
            raise RuntimeError(f"the Prefect server did not start; log: {self._log_file}")
        return address

    def leave(self) -> None:
        """Stop using the server; wait for its exit if it ends with its users and this was the last one."""
        self._users.close()
        deadline = time.monotonic() + STOP_TIMEOUT
        while self._locks.is_alive(self.port):
            with self._locks.locked():
                if self._locks.is_used(self.port) or not self._locks.ends_with_users(self.port):
                    return
            if time.monotonic() > deadline:
                return
            time.sleep(0.05)
        self._locks.remove(self.port)


def start_module(module: Sequence[str], log_file: Path, **options: Any) -> subprocess.Popen[bytes]:
    """Start `python -m MODULE ARGUMENTS...` in a new session, with its output appended to the log file."""
    command = [sys.executable, "-P", "-m", *module]
    with log_file.open("ab") as output:
        streams = {"stdout": output, "stderr": subprocess.STDOUT}
        return subprocess.Popen(command, start_new_session=True, **streams, **options)


def wait_healthy(api: str, is_alive: Callable[[], bool]) -> bool:
    """Wait until the API is healthy; False after START_TIMEOUT or if the server exits first."""
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline and is_alive():
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{api}/health", timeout=5):
            return True
        time.sleep(0.05)
    return False


def _is_locked(path: Path) -> bool:
    """Whether a process holds a lock on the file."""
    try:
        with path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _stop_without_users(locks: ServerLocks, port: int) -> None:
    """End this process, the server, once it has no users."""
    while True:
        time.sleep(CHECK_SECONDS)
        with locks.locked():
            if not locks.is_used(port):
                locks.close(port)
                break
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(STOP_TIMEOUT / 2)
    os._exit(0)


def main(listener: socket.socket, home: Path) -> None:
    """Serve the API on a bound socket, without the UI.

    Only the services of Prefect's own ephemeral server run.
    """
    port = listener.getsockname()[1]
    watch = threading.Thread(target=_stop_without_users, args=(ServerLocks(home), port), daemon=True)
    watch.start()
    os.environ |= {"PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1", "PREFECT_UI_ENABLED": "0"}
    os.environ |= cors_setting(port)

    with without_garbage_collection():
        import uvicorn
        from prefect.server.api.server import create_app

        app = create_app()
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listener])


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[2]))
