"""Fixtures of browser tests: the system's Chromium, and a Prefect server with its UI."""

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from tests.flows.conftest import command, profile  # noqa: F401


@pytest.fixture(scope="module")
def browser():
    """Chromium, per module: while Playwright's event loop runs, Prefect's sync calls would return coroutines."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("needs a chromium: make test-system")
    from playwright.sync_api import sync_playwright

    arguments = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=arguments)
        yield started
        started.close()


@pytest.fixture(scope="session")
def prefect_ui(prefect_database, tmp_path_factory):
    """Address of a Prefect server with its UI and an empty database."""
    folder = tmp_path_factory.mktemp("prefect-ui")
    shutil.copy(prefect_database, folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    environment = {**os.environ, "PREFECT_HOME": str(folder), "PREFECT_API_URL": f"{address}/api"}
    with (folder / "server.log").open("wb") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        _wait(f"{address}/api/health")
        yield address
    finally:
        server.terminate()
        server.wait(timeout=60)


def _wait(address: str) -> None:
    deadline = time.monotonic() + 120
    while True:
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except (urllib.error.URLError, ConnectionError):
            assert time.monotonic() < deadline, f"no response from {address}"
            time.sleep(0.2)
