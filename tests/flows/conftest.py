"""Fixtures of the flow's tests: the pipeline in this process, and the command in one of its own."""

from pathlib import Path

import pytest

from tests.flows.micro import Command, write_profile


@pytest.fixture(scope="session")
def profile(tmp_path_factory):
    """Path of the profile `micro`."""
    return write_profile(tmp_path_factory.mktemp("micro"))


@pytest.fixture(scope="session")
def pretrain(prefect_server, profile):
    """The flow in this process: `pretrain(store, *overrides, name=None)` gives its result, steps by name."""
    from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

    from flows.pretrain import pretrain

    def call(store: Path, *overrides: str, name: str | None = None) -> dict:
        # A flow's end waits for its heartbeat, up to a second.
        with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
            result = pretrain(str(profile), list(overrides), name, str(store))
        return {**result, "how": {step["step"]: step["how"] for step in result["steps"]}}

    return call


@pytest.fixture
def command(tmp_path):
    """Starts `trainshed` with these arguments; what still runs at the end of the test is killed."""
    started = []

    def start(*arguments: str, **environment: str) -> Command:
        started.append(Command(*arguments, cwd=tmp_path, **environment))
        return started[-1]

    yield start
    for each in started:
        each.end()
