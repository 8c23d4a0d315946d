"""Files of a Prefect home that tell whether its server runs, where, and who uses it.

<home>/server.json          the server's port and host
<home>/server.lock          held to start, join or end a server
<home>/server-<port>.alive  held by the server
<home>/server-<port>.users  held in shared mode by the commands that use it
<home>/password             of the API, which only this user can read
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import platform
from pathlib import Path
from typing import IO, Any

from flows.server.prefect_settings import PRIVATE
from profiles.errors import ProfileError
from profiles.files import file_locks, state_files


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

    def locked(self) -> contextlib.AbstractContextManager[bool]:
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
        return _is_locked(self._file(port, "alive"), fcntl.LOCK_SH)  # which another probe does not exclude

    def has_another(self, port: int) -> bool:
        """Whether a server of this home runs on another port."""
        server = self._read()
        return server is not None and server["port"] != port and self.is_alive(server["port"])

    def is_used(self, port: int) -> bool:
        """Whether the server has users; waits for the lock of the home."""
        with self.locked():  # a probe holds the users' lock, too, and another would take it for a user
            return _is_locked(self._file(port, "users"))

    def close_unused(self, port: int) -> bool:
        """Stop accepting users of the server, unless it has some; returns whether it had none."""
        with self.locked():
            if _is_locked(self._file(port, "users")):
                return False
            self.close(port)
        return True

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
        return state_files.read_json(self.home / "server.json", {"port": int}, ["port"])

    def _file(self, port: int, kind: str) -> Path:
        return self.home / f"server-{port}.{kind}"


def _is_locked(path: Path, probe: int = fcntl.LOCK_EX) -> bool:
    """Whether a process holds a lock on the file that excludes the mode `probe`."""
    try:
        with path.open("r+b") as file:
            fcntl.flock(file, probe | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
