"""What all tests share: a Prefect of their own, and skips that count as failures where they should not happen."""

import atexit
import os
import shutil
import tempfile

import hypothesis
import pytest

pytest_plugins = ["tests.pool"]

# Before anything imports Prefect: the user's own settings and database stay out of the tests.
os.environ["PREFECT_HOME"] = tempfile.mkdtemp(prefix="trainshed-tests-prefect-")
atexit.register(shutil.rmtree, os.environ["PREFECT_HOME"], ignore_errors=True)
os.environ["PREFECT_SERVER_ANALYTICS_ENABLED"] = "false"
for _name in ("PREFECT_API_URL", "PREFECT_PROFILE"):
    os.environ.pop(_name, None)

# A loaded machine is no failure.
hypothesis.settings.register_profile(
    "trainshed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("trainshed")

NO_SKIPS = os.environ.get("TRAINSHED_NO_SKIPS") == "1"


@pytest.fixture(scope="session")
def prefect_server():
    """One Prefect server for all tests that need one; gives its API's address."""
    from prefect.settings import PREFECT_API_URL
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=120):
        yield PREFECT_API_URL.value()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    return _no_skip((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    return _no_skip((yield))


def _no_skip(report):
    """With TRAINSHED_NO_SKIPS=1 a skipped test fails, unless what it lacks is an accelerator."""
    if NO_SKIPS and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if "accelerator" not in reason.lower():
            report.outcome = "failed"
            report.longrepr = f"skipped, which TRAINSHED_NO_SKIPS=1 does not allow: {reason}"
    return report
