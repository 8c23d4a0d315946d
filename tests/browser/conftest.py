"""Fixtures of browser tests: the system's Chromium, and a Prefect server with its UI."""

import os
import shutil
import subprocess
import sys

import pytest

from flows.server.shared_server import wait_healthy
from tests.flows.conftest import command, profile  # noqa: F401
from tests.ports import free_port


@pytest.fixture(scope="module")
def browser():
    """Chromium, per module, as Prefect's sync calls return coroutines while Playwright's event loop runs."""
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
    port = free_port()
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
        assert wait_healthy(f"{address}/api", lambda: server.poll() is None)
        yield address
    finally:
        server.terminate()
        server.wait(timeout=180)
