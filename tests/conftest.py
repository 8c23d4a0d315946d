"""Settings of the whole suite: Prefect's home and server, groups for pytest-xdist, the `slow` marker, no silent skips."""

import atexit
import os
import shutil
import tempfile
from pathlib import Path

import hypothesis
import pytest

pytest_plugins = ["tests.pool"]

# Set before anything imports Prefect, so that tests never touch the user's settings and database. Each xdist worker
# has its own home, hence its own server and database.
os.environ["PREFECT_HOME"] = tempfile.mkdtemp(prefix="trainshed-tests-prefect-")
atexit.register(shutil.rmtree, os.environ["PREFECT_HOME"], ignore_errors=True)
os.environ["PREFECT_SERVER_ANALYTICS_ENABLED"] = "false"
for _name in ("PREFECT_API_URL", "PREFECT_PROFILE"):
    os.environ.pop(_name, None)

# Inductor otherwise compiles, and loads in another interpreter, a probe of every instruction set in each process: 9 s of CPU.
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"

# No deadlines: a loaded machine is not a failure.
hypothesis.settings.register_profile(
    "trainshed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("trainshed")

TESTS = Path(__file__).parent
SLOW_FIXTURES = {"_cluster", "browser", "command", "pool", "prefect_server", "prefect_ui"}
"""Fixtures that start servers, clusters or processes: `make test-fast` leaves out the tests that use one."""
START_ORDER = ("docs", "flows", "browser", "slurm", "benchmarks", "parity", "parallel", "modeling", "tasks")
"""Folders of tests by how long their files take, the longest first."""
NO_SKIPS = os.environ.get("TRAINSHED_NO_SKIPS") == "1"


@pytest.fixture(scope="session")
def prefect_server():
    """Start one Prefect server per worker; yields the URL of its API."""
    from prefect.settings import PREFECT_API_URL
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=120):
        yield PREFECT_API_URL.value()


def pytest_xdist_auto_num_workers() -> int:
    """`-n auto`: one worker more than cores, because tests of clusters and servers mostly wait."""
    return min(8, (os.cpu_count() or 1) + 1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark slow tests, group tests for xdist, and put the longest groups first so that workers finish together."""
    for item in items:
        if SLOW_FIXTURES & set(item.fixturenames):
            item.add_marker("slow")
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(_group(item)))
    items.sort(key=_start_order)


def _group(item) -> str:
    """Tests of one group run in one worker: those of the cluster, which takes two cores, else those of one file."""
    return "slurm" if "_cluster" in item.fixturenames else str(item.path.relative_to(TESTS).with_suffix(""))


def _start_order(item) -> tuple[bool, int]:
    top = item.path.relative_to(TESTS).parts[0]
    position = START_ORDER.index(top) if top in START_ORDER else len(START_ORDER)
    return "_cluster" not in item.fixturenames, position


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
