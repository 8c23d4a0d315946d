"""File locks are shared or exclusive, also over NFS."""

import errno
import fcntl
import os
import re
from pathlib import Path

import pytest

from profiles.files.file_locks import locked, supported
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


@pytest.mark.parametrize("missing", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_file_system_without_locks_stops_only_what_requires_one(tmp_path, monkeypatch, missing):
    def reject(*_):
        raise OSError(missing, os.strerror(missing))

    with locked(tmp_path / "lock", required=False) as held:
        assert held
        assert supported(tmp_path / "lock")  # although it is held
    monkeypatch.setattr(fcntl, "flock", reject)
    assert not supported(tmp_path / "lock")
    with locked(tmp_path / "lock", required=False) as held:
        assert not held
    message = f"{os.strerror(missing)}; its file system has no file locks: '{tmp_path / 'lock'}'"
    with pytest.raises(OSError, match=re.escape(message)), locked(tmp_path / "lock"):
        pass
