"""File locks are shared or exclusive, also over NFS."""

from pathlib import Path

from profiles.file_locks import locked
from tests import faults


def is_held(path: Path, *, shared: bool) -> bool:
    try:
        with locked(path, shared=shared, wait=False):
            return False
    except BlockingIOError:
        return True


def test_shared_and_exclusive_locks_also_over_nfs(tmp_path, monkeypatch):
    faults.lock_as_nfs(monkeypatch)
    path = tmp_path / "lock"
    with locked(path, shared=True), locked(path, shared=True, wait=False):
        assert is_held(path, shared=False)
    with locked(path):
        assert is_held(path, shared=True)
    assert not is_held(path, shared=False)
