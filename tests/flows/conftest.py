"""Fixtures of flow tests: the pipeline in this process, and the `trainshed` command in another."""

import contextlib
from pathlib import Path
from typing import Any

import pytest

from tests.flows.micro import Command, write_profile
from tests.flows.webhook import serve
from tests.forked_jobs import forked_jobs


@pytest.fixture(scope="session")
def profile(tmp_path_factory):
    """Path of the profile `micro`."""
    return write_profile(tmp_path_factory.mktemp("micro"))


@pytest.fixture(scope="session")
def pretrain(prefect_server, profile):
    """Run the flow in-process: `pretrain(store, *overrides, name=None)` returns results and step outcomes.

    Ranks are forked (tests/forked_jobs.py) unless `torchrun` is set.
    """
    from flows.pretrain import pretrain

    def call(
        store: Path, *overrides: str, name: str | None = None, torchrun: bool = False, **options: Any
    ) -> dict:
        with contextlib.nullcontext() if torchrun else forked_jobs():
            result = pretrain(str(profile), list(overrides), name, str(store), **options)
        return {**result, "how": {step["step"]: step["how"] for step in result["steps"]}}

    return call


@pytest.fixture(scope="module")
def finished(pretrain, tmp_path_factory):
    """A store with one finished run, and the flow's result."""
    store = tmp_path_factory.mktemp("finished") / "store"
    return store, pretrain(store, torchrun=True)


@pytest.fixture
def webhook():
    """A webhook server on loopback."""
    with serve() as server:
        yield server


@pytest.fixture
def command(prefect_home, tmp_path):
    """Start `trainshed` with these arguments; kill its remaining processes after the test."""
    started = []

    def start(*arguments: str, **environment: str) -> Command:
        started.append(Command(*arguments, cwd=tmp_path, **environment))
        return started[-1]

    yield start
    for each in started:
        each.end()
