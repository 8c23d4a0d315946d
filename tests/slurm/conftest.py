"""One cluster for all tests of this folder, whole again and empty before each."""

import pytest

from tests.slurm.cluster import Cluster, missing


@pytest.fixture(scope="session")
def _cluster():
    if missing():
        pytest.skip(missing())
    with Cluster() as cluster:
        yield cluster


@pytest.fixture
def cluster(_cluster):
    _cluster.heal()
    yield _cluster
    _cluster.heal()
