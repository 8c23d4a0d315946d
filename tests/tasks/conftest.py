"""Fixtures of the tests of tasks."""

import pytest

from profiles import resolve
from tasks.step import Context
from tasks.steps.dataset import DatasetStep
from tasks.steps.tokenizer import TokenizerStep
from tasks.store.store import Store
from tests.hub import Hub


@pytest.fixture
def store(tmp_path) -> Store:
    return Store(str(tmp_path / "store"))


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub on loopback, and an empty cache."""
    with Hub() as served:
        served.patch(monkeypatch, tmp_path / "hub-cache")
        yield served


@pytest.fixture(scope="module")
def tokenized(tmp_path_factory):
    """A profile, a store, and the artifact of the profile's dataset in it."""
    from tests.flows.micro import write_profile

    folder = tmp_path_factory.mktemp("tokenized")
    profile = resolve.load(str(write_profile(folder)), ["evaluate.every=0"])
    context = Context(profile, Store(str(folder / "store")))
    return profile, context.store, DatasetStep(TokenizerStep().run(context)).run(context)
