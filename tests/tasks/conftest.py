"""What tests of tasks share."""

import pytest

from tasks.artifacts import Store


@pytest.fixture
def store(tmp_path) -> Store:
    return Store(str(tmp_path / "store"))
