"""A Prefect server for the length of one command, for those who run none.

It starts in about 3 s (10 s on a machine's first use, when its database is made), beside the imports of the flow.
It runs in a session of its own, so that Ctrl-C reaches the flow alone, which can then still report its end; and it
watches a pipe from its parent, so that it never outlives it, however that one ended.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

START_TIMEOUT = 120.0  # seconds; the first start on a slow disk makes a database


@contextlib.contextmanager
def serving(log_file: Path) -> Iterator[Server]:
    """Start a server and end it with the block; `Server.wait` gives its address once it answers."""
    server = Server(log_file)
    try:
        yield server
    finally:
        server.stop()


class Server:
    def __init__(self, log_file: Path) -> None:
        self._log_file = log_file
        self._port = _free_port()
        log_file.parent.mkdir(parents=True, exist_ok=True)
        with log_file.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "flows.cli.temporary_server", str(self._port)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self) -> str:
        """The API's address, once it is healthy. RuntimeError where it does not get so far."""
        address = f"http://127.0.0.1:{self._port}/api"
        deadline = time.monotonic() + START_TIMEOUT
        while time.monotonic() < deadline and self._process.poll() is None:
            with (
                contextlib.suppress(urllib.error.URLError, ConnectionError),
                urllib.request.urlopen(f"{address}/health", timeout=5),
            ):
                return address
            time.sleep(0.05)
        raise RuntimeError(f"the Prefect server did not start; its log: {self._log_file}")

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _end_with_parent() -> None:
    sys.stdin.buffer.read()  # returns when the parent, which holds the other end, is gone
    os._exit(0)


def main(port: int) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # No UI and only the services that a single run needs, as Prefect's own ephemeral server has it.
    os.environ |= {"PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1", "PREFECT_UI_ENABLED": "0"}

    import uvicorn
    from prefect.server.api.server import create_app

    uvicorn.run(create_app(), host="127.0.0.1", port=port, log_level="error")


if __name__ == "__main__":
    main(int(sys.argv[1]))
