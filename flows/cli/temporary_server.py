"""A Prefect server for the length of one command.

It starts in about 3 s (10 s the first time, when it creates its database) while the flow is being imported. It runs in
its own session, so that Ctrl-C reaches only the flow, which can then still report its end. It reads a pipe from its
parent, so that it exits with it however the parent ends.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

START_TIMEOUT = 120.0  # seconds


@contextlib.contextmanager
def temporary_server(log_file: Path) -> Iterator[Server]:
    """Start a server, and stop it when the block ends."""
    server = Server(log_file)
    try:
        yield server
    finally:
        server.stop()


class Server:
    """A server process; `wait` returns its address."""

    def __init__(self, log_file: Path) -> None:
        self._log_file = log_file
        self._port = _free_port()
        log_file.parent.mkdir(parents=True, exist_ok=True)
        module = ("flows.cli.temporary_server", str(self._port))
        self._process = start_module(module, log_file, stdin=subprocess.PIPE)

    def wait(self) -> str:
        """Wait until the server is healthy and return its API's address. Raises RuntimeError after START_TIMEOUT."""
        address = f"http://127.0.0.1:{self._port}/api"
        if not wait_healthy(address, self._process):
            raise RuntimeError(f"the Prefect server did not start; log: {self._log_file}")
        return address

    def stop(self) -> None:
        """Terminate the server; kill it after 5 s."""
        self._process.terminate()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def start_module(module: Sequence[str], log_file: Path, **options: Any) -> subprocess.Popen[bytes]:
    """Start `python -m MODULE ARGUMENTS...` in a new session, with its output appended to the log file."""
    command = [sys.executable, "-P", "-m", *module]
    with log_file.open("ab") as output:
        streams = {"stdout": output, "stderr": subprocess.STDOUT}
        return subprocess.Popen(command, start_new_session=True, **streams, **options)


def wait_healthy(api: str, server: subprocess.Popen[bytes]) -> bool:
    """Whether the API becomes healthy within START_TIMEOUT, before the server exits."""
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline and server.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{api}/health", timeout=5):
            return True
        time.sleep(0.05)
    return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _exit_with_parent() -> None:
    sys.stdin.buffer.read()  # returns when the parent, which holds the other end, has ended
    os._exit(0)


def main(port: int) -> None:
    """Serve the API without the UI and with only the services of Prefect's own ephemeral server."""
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    os.environ |= {"PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1", "PREFECT_UI_ENABLED": "0"}

    import uvicorn
    from prefect.server.api.server import create_app

    uvicorn.run(create_app(), host="127.0.0.1", port=port, log_level="error")


if __name__ == "__main__":
    main(int(sys.argv[1]))
