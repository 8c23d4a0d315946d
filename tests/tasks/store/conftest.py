"""Remote stores, shared by the tests of the store."""

import pytest

from tasks.store.store import Store
from tests import s3


@pytest.fixture(params=["memory", pytest.param("s3", marks=pytest.mark.s3)])
def remote(request, monkeypatch, tmp_path):
    """Opens one remote store for a named machine, each with its own local folder."""
    if request.param == "memory":
        import fsspec

        fsspec.filesystem("memory").store.clear()
        yield lambda machine: Store("memory://bucket/store", tmp_path / machine)
        return
    with s3.bucket(monkeypatch) as address:
        yield lambda machine: Store(f"{address}/store", tmp_path / machine)
