"""Fixtures of browser tests: the system's Chromium, and a Prefect server with its UI."""

import shutil

import pytest

from flows.server.locks import ServerLocks
from flows.server.serve import UP
from flows.server.shared_server import start_server, wait_healthy
from tests.flows.conftest import command, profile  # noqa: F401

FOREIGN = "pages.example"  # a web site, whose name is resolved to this machine


@pytest.fixture(scope="module")
def browser():
    """Chromium, per module, as Prefect's sync calls return coroutines while Playwright's event loop runs."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("needs a chromium: make test-system")
    from playwright.sync_api import sync_playwright

    arguments = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
    arguments.append(f"--host-resolver-rules=MAP {FOREIGN} 127.0.0.1")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=arguments)
        yield started
        started.close()


@pytest.fixture(scope="module")
def prefect_ui(prefect_database, tmp_path_factory):
    """Address of a server as `trainshed up` starts it, with an empty database."""
    folder = tmp_path_factory.mktemp("prefect-ui")
    shutil.copy(prefect_database, folder)
    locks = ServerLocks(folder)
    with locks.locked():
        server = start_server(locks, UP, 0, folder / "server.log")
    port, users = locks.join()
    address = f"http://127.0.0.1:{port}"
    try:
        assert wait_healthy(f"{address}/api", lambda: server.poll() is None)
        yield address
    finally:
        users.close()
        server.terminate()
        server.wait(timeout=180)
