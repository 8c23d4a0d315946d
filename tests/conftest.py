"""Test suite settings: Prefect's home and server, xdist groups, the `slow` marker, no silent skips."""

import atexit
import contextlib
import importlib
import logging
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from itertools import zip_longest
from pathlib import Path

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

from flows.server.prefect_settings import give_name_and_home, single_certificate_setting
from modeling.compilation import toolchain
from modeling.cores import usable_cores, usable_memory
from profiles.files.file_locks import locked
from tests import forkserver
from tests.garbage import Collector

# Set before anything imports Prefect, so that tests never touch the user's settings and database. Each xdist worker
# has its own home, hence its own server and database.
os.environ["PREFECT_HOME"] = tempfile.mkdtemp(prefix="trainshed-tests-prefect-")
atexit.register(shutil.rmtree, os.environ["PREFECT_HOME"], ignore_errors=True)
give_name_and_home(Path(os.environ["PREFECT_HOME"]))
os.environ |= single_certificate_setting(Path(os.environ["PREFECT_HOME"]))
os.environ["PREFECT_SERVER_ANALYTICS_ENABLED"] = "false"
for _name in ("PREFECT_API_URL", "PREFECT_PROFILE"):
    os.environ.pop(_name, None)
# Of all local servers that tests start, instead of one generated for each home.
os.environ["PREFECT_API_AUTH_STRING"] = "tests:password"

# A script ignores Ctrl-C in what it starts in the background, such as `make test &`, and so would these processes and theirs.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Otherwise inductor compiles a probe for every instruction set in each process, and loads it in another one: 9 s of CPU.
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"

# Otherwise Dynamo collects garbage after each frame that it compiles: 12 ms, with little to collect in a test.
os.environ["TORCH_DYNAMO_RUN_GC_AFTER_COMPILE"] = "0"

# Waiting OpenMP threads release the core for other tests.
os.environ["OMP_WAIT_POLICY"] = "passive"

# No deadlines: slowness on a loaded machine is not a failure.
hypothesis.settings.register_profile(
    "trainshed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("trainshed")

CREATE_DATABASE = """
import asyncio, gc
gc.disable()  # which saves a quarter of the CPU time
from prefect.server.database import provide_database_interface
asyncio.run(provide_database_interface().create_db())
"""
SLOW_FIXTURES = {"_cluster", "browser", "command", "pool", "prefect_database", "prefect_ui"}
"""Fixtures that start servers, clusters or processes: `make test-fast` skips tests that use one."""

WAITING = {"slurm", "flows", "browser"}
"""Folders whose tests mostly wait, for clusters and servers; the tests of all others mostly compute."""

_LONGEST = ("slurm", "emulation", "flows", "browser", "benchmarks", "parity", "modeling", "profiles")
START_ORDER = {folder: position for position, folder in enumerate(_LONGEST)} | {"docs": 100}
"""Folders that start first, since their files take longest; those of docs, single tests, fill up the end."""
NO_SKIPS = os.environ.get("TRAINSHED_NO_SKIPS") == "1"


@pytest.fixture(scope="session")
def prefect_database(tmp_path_factory):
    """Path of an empty Prefect database, to be copied into a Prefect home: creating one takes 6 s of CPU."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # of all workers
    path = folder / "prefect-database/prefect.db"
    with locked(folder / "prefect-database.lock"):
        if not path.exists():
            home = path.parent.with_suffix(".partial")
            environment = {**os.environ, "PREFECT_HOME": str(home)}
            subprocess.run([sys.executable, "-c", CREATE_DATABASE], env=environment, check=True)
            with contextlib.closing(sqlite3.connect(home / path.name)) as database:
                database.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # leaves a single file
            home.rename(path.parent)
    return path


@pytest.fixture(scope="session")
def prefect_home(prefect_database):
    """This worker's Prefect home, with a database."""
    home = Path(os.environ["PREFECT_HOME"])
    shutil.copy(prefect_database, home)
    return home


@pytest.fixture(scope="session")
def prefect_server(prefect_database, tmp_path_factory):
    """One Prefect server per worker; yields the URL of its API.

    Flows of this process send no heartbeats: a flow waits up to a second for the last one. Both settings are made here, once,
    because Prefect takes 0.1 s of CPU to create settings.
    """
    from prefect import context
    from prefect.logging.handlers import APILogWorker
    from prefect.settings import PREFECT_API_URL, PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

    from flows.server.shared_server import Server

    home = tmp_path_factory.mktemp("prefect-server")
    shutil.copy(prefect_database, home)
    server = Server(home, home / "server.log")
    url = server.wait()
    # Set for all threads, as in Prefect's own test harness.
    with (
        temporary_settings({PREFECT_API_URL: url, PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}),
        context._temporary_global_settings_context(context.get_settings_context()),
    ):
        yield url
        APILogWorker.drain_all(timeout=5)  # before the server stops
    server.leave()


@pytest.fixture(autouse=True)
def _logging():
    """Remove log handlers that a command installs for its process, so that later tests do not see them."""
    root = logging.getLogger()
    before = [*root.handlers]
    yield
    root.handlers = [handler for handler in root.handlers if handler in before]


@pytest.fixture
def waits(monkeypatch):
    """Seconds of each wait before a retry of a network call; the waits are skipped."""
    seconds = []
    monkeypatch.setattr("profiles.files.retries.sleep", seconds.append)
    return seconds


def pytest_configure(config):
    """Make traces and garbage collection cheaper, except in xdist's controller, which runs no test.

    The controller starts the fork server of its workers instead.
    """
    if hasattr(config, "workerinput"):
        forkserver.use(config.workerinput["forkserver"])
    if hasattr(config, "workerinput") or not config.getoption("tx"):
        importlib.import_module("tests.cheap_torch")
        config.pluginmanager.register(Collector())


def pytest_configure_node(node):
    """Let an xdist worker use the fork server of the controller."""
    node.workerinput["forkserver"] = forkserver.start()


@pytest.fixture(scope="module")
def pool():
    """A pool of ranks, per module: gloo's threads take each idle rank half a percent of a core."""
    from tests.pool import Pool

    with Pool() as shared:
        yield shared


def pytest_xdist_auto_num_workers() -> int:
    """`-n auto`: two workers more than there are cores, because tests of clusters and servers mostly wait.

    Fewer with little memory: a worker and what it starts take up to 3 GB.
    """
    return max(1, min(8, usable_cores() + 2, usable_memory() // (3 << 30)))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark slow tests, and order groups so that workers use all cores and finish together.

    The longest groups come first, and groups that wait alternate with groups that compute.
    """
    for item in items:
        if SLOW_FIXTURES & set(item.fixturenames):
            item.add_marker("slow")
    _skip(items, "cuda", _missing_gpu)
    _skip(items, "compiles", toolchain.missing)
    items.sort(key=lambda item: START_ORDER.get(_folder(item.nodeid), len(START_ORDER)))
    groups: dict[str, list] = {}
    for item in items:
        groups.setdefault(_group(item.nodeid), []).append(item)
    waiting, computing = [], []
    for name, members in groups.items():
        (waiting if _folder(name) in WAITING else computing).append(members)
    items[:] = [
        item for pair in zip_longest(waiting, computing, fillvalue=()) for group in pair for item in group
    ]


def _skip(items, marker, missing):
    """Skip tests with this marker if something that they need is missing; `missing` returns what, or None."""
    marked = [item for item in items if item.get_closest_marker(marker)]
    if marked and (lacks := missing()):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=lacks))


def _missing_gpu():
    """Importing torch takes seconds, and most selections of tests need no GPU."""
    import torch

    return None if torch.cuda.is_available() else "no CUDA accelerator"


class Groups(LoadScopeScheduling):
    """Sends all tests of a group to one worker, and those that a crashed worker has left to another one."""

    def _split_scope(self, nodeid: str) -> str:
        return _group(nodeid)

    def remove_node(self, node):
        """Return the test that a worker crashed in, if any, and let others run only those that follow.

        pytest-xdist 3.8 also lets them run this test again, and waits forever for one that has completed.
        """
        units = self.assigned_work.pop(node)
        left = [(name, test) for name, unit in units.items() for test, done in unit.items() if not done]
        for name, test in left[1:]:
            self.workqueue.setdefault(name, {})[test] = False
        for other in self.nodes:
            self._reschedule(other)
        return left[0][1] if left else None

    def schedule(self):
        """Assign two groups to each new worker: it only runs a test if it has the next one, too."""
        super().schedule()
        for node in self.nodes:
            self._reschedule(node)


def pytest_xdist_make_scheduler(config, log):
    return Groups(config, log)


def _group(nodeid: str) -> str:
    """The file of a test; in tests/docs, where each test is its own group, the test."""
    return nodeid if _folder(nodeid) == "docs" else nodeid.partition("::")[0]


def _folder(nodeid: str) -> str:
    """The folder of a test below tests/."""
    return nodeid.removeprefix("tests/").partition("/")[0]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    return _no_skip((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    return _no_skip((yield))


def _no_skip(report):
    """With TRAINSHED_NO_SKIPS=1, turn a skipped test into a failure unless it lacks an accelerator."""
    if NO_SKIPS and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if "accelerator" not in reason.lower():
            report.outcome = "failed"
            report.longrepr = f"skipped, but TRAINSHED_NO_SKIPS=1 forbids skips: {reason}"
    return report
