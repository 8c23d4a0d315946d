"""The Prefect server that the commands on one store share."""

import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import HTTPServer, SimpleHTTPRequestHandler
from itertools import chain
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from flows.cli.run import _where_to_watch
from flows.server.locks import ServerLocks
from flows.server.prefect_settings import PASSWORD, access_settings, configure
from flows.server.serve import CHECK_SECONDS, _look_seldom_for_tasks
from flows.server.shared_server import Server, shared_server
from tests import faults
from tests.flows.cli.test_up import allows_pages_of, ask
from tests.waiting import until

USER = """
import sys, time
from pathlib import Path
from flows.server.shared_server import Server
server = Server(Path(sys.argv[1]), Path(sys.argv[2]))
print(server.wait(), flush=True)
time.sleep(600)
"""
WATCH = """
import sys
from pathlib import Path
from flows.server.locks import ServerLocks
from flows.server.serve import stop_without_users
locks = ServerLocks(Path(sys.argv[1]))
print(flush=True)
stop_without_users(locks, 4200)
"""


@pytest.fixture
def environment(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "planted")
    monkeypatch.setenv("TRAINSHED_TEST", "shared-server")


def servers() -> list[psutil.Process]:
    """Servers that were started by this test."""
    found = []
    for process in psutil.process_iter():
        try:
            if (
                process.environ().get("TRAINSHED_TEST") == "shared-server"
                and "flows.server.serve" in process.cmdline()
            ):
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.slow
def test_commands_share_a_server_that_ends_with_the_last_and_keeps_its_history(
    environment, prefect_database, tmp_path
):
    home, log = tmp_path / "home", tmp_path / "server.log"
    home.mkdir()
    shutil.copy(prefect_database, home)
    first = Server(home, log)
    address = first.wait()
    (server,) = servers()
    assert "HF_TOKEN" not in server.environ()
    assert not allows_pages_of("https://example.org", address)
    command = [sys.executable, "-c", USER, str(home), str(log)]
    second = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert second.stdout.readline().strip() == address
        first.leave()
        ask(f"{address}/flows/", {"name": "remembered"})
        assert servers() == [server]
    finally:
        second.kill()
        second.communicate()
    server.wait(timeout=180)

    with shared_server(home, log) as third:
        assert [flow["name"] for flow in ask(f"{third.wait()}/flows/filter")] == ["remembered"]
        (server,) = servers()
        server.kill()
        server.wait(timeout=180)
        until(servers)  # started again, at the same address
        assert ask(f"{third.wait()}/flows/filter")
    assert servers() == []


def test_server_ends_once_its_home_is_deleted(tmp_path):
    """With its store: no command can find this server again."""
    home = tmp_path / "home"
    locks = ServerLocks(home)
    with locks.record_server(4200, ends_with_users=True), locks.join()[1]:
        command = [sys.executable, "-c", WATCH, str(home)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
            server.stdout.readline()
            time.sleep(3 * CHECK_SECONDS)
            assert server.poll() is None
            while home.exists():  # the server still writes to it
                shutil.rmtree(home, ignore_errors=True)
            assert server.wait(timeout=60) == -signal.SIGTERM


def test_each_home_has_a_password_of_its_own_that_others_cannot_read(tmp_path, monkeypatch):
    monkeypatch.delenv(PASSWORD)
    first, second = tmp_path / "first", tmp_path / "second"
    found = access_settings(first)
    assert found == access_settings(first)
    assert found[PASSWORD] != access_settings(second)[PASSWORD]
    assert mode(first / "password") == 0o600
    (first / "password").write_text("")  # as after a power failure
    assert len(access_settings(first)[PASSWORD]) > 30


def test_ui_is_named_only_if_the_server_has_one(prefect_server):
    with HTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as other:  # has pages, as `trainshed up`
        threading.Thread(target=other.handle_request, daemon=True).start()
        address = f"http://127.0.0.1:{other.server_port}"
        assert _where_to_watch(f"{address}/api", "") == f"Prefect's UI: {address}"
    lines = _where_to_watch(prefect_server, ", database in store/prefect-home").splitlines()
    assert lines[0] == f"Prefect's API: {prefect_server}, database in store/prefect-home"
    assert "`trainshed up`" in lines[1]
    assert max(map(len, lines)) <= 80


def test_server_of_up_remains_after_its_last_user(tmp_path, monkeypatch):
    locks = ServerLocks(tmp_path)
    with locks.record_server(4200, ends_with_users=False):
        for _ in range(2):
            user = Server(tmp_path, tmp_path / "server.log")
            assert not user.started
            user.leave()
        assert locks.is_alive(4200)
        user = Server(tmp_path, tmp_path / "server.log")
    # It was killed: `up` starts it again, a command only if that does not happen.
    starts = []
    monkeypatch.setattr(
        "flows.server.shared_server.start_server", lambda *arguments: starts.append(arguments)
    )
    user.keep_running()
    assert not starts
    monkeypatch.setattr("flows.server.shared_server.UP_SECONDS", 0.0)
    user.keep_running()
    assert len(starts) == 1
    user.leave()
    (tmp_path / "server.json").write_text("")  # as after a power failure
    assert ServerLocks(tmp_path).join() is None


def test_server_of_a_prefect_without_the_names_of_its_worker_is_only_less_idle(monkeypatch):
    api, workers = ModuleType("prefect.server.api"), ModuleType("background_workers")
    monkeypatch.setitem(sys.modules, api.__name__, api)
    _look_seldom_for_tasks()
    api.background_workers = workers
    _look_seldom_for_tasks()
    workers.Worker = print
    _look_seldom_for_tasks()
    assert workers.Worker is print


def test_home_is_locked_also_over_nfs_and_no_probe_is_taken_for_a_user(tmp_path, monkeypatch):
    faults.lock_as_nfs(monkeypatch)
    locks = ServerLocks(tmp_path)
    with locks.locked(), locks.record_server(4200, ends_with_users=True):
        port, users = locks.join()
    with users:
        assert port == 4200
        assert locks.is_used(port)

    def probe(_: int) -> list[bool]:
        return [locks.is_used(port) or locks.is_alive(port) for _ in range(10)]

    flock = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", lambda *given: (flock(*given), time.sleep(0.001)))
    with ThreadPoolExecutor() as commands:  # at the same time
        assert not any(chain.from_iterable(commands.map(probe, range(2))))


def test_each_user_of_a_store_has_a_home_that_others_cannot_read(tmp_path, monkeypatch):
    def home() -> Path:
        monkeypatch.setattr(os, "environ", {})
        return ServerLocks(configure(tmp_path)).home

    first = home()
    assert first == tmp_path / "prefect-home"
    assert mode(first) == 0o700
    first.chmod(0o755)  # as an earlier version created it
    assert home() == first
    assert mode(first) == 0o700
    user = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert home() == tmp_path / f"prefect-home-{user}"
    assert mode(home()) == 0o700


def mode(path: Path) -> int:
    """Permissions of a file."""
    return stat.S_IMODE(path.stat().st_mode)
