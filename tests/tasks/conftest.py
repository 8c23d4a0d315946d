"""Fixtures of the tests of tasks."""

import pytest

from tasks.store.store import Store


@pytest.fixture
def store(tmp_path) -> Store:
    return Store(str(tmp_path / "store"))
