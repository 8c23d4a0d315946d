"""Prefect's home is in the store, or where its database can be locked."""

import getpass
import os
import stat
from pathlib import Path

import pytest

from flows.server.prefect_settings import configure
from tests import faults


@pytest.fixture
def unset(monkeypatch, tmp_path):
    """An environment without Prefect's home, with empty folders for the user's state and temporary files."""
    for name in ("PREFECT_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("os.environ", os.environ.copy())


def test_without_file_locks_in_the_store_the_database_is_in_another_folder(unset, monkeypatch, tmp_path):
    store = tmp_path / "store"
    assert configure(store) == store / "prefect-home"
    del os.environ["PREFECT_HOME"]

    for denied, place in ((["store"], "user/.local/state"), (["store", "user"], "tmp")):
        with monkeypatch.context() as patch:
            faults.deny_locks(patch, *(tmp_path / name for name in denied))
            home = configure(store)
            assert home.parent == tmp_path / place
            assert stat.S_IMODE(home.stat().st_mode) == 0o700
            del os.environ["PREFECT_HOME"]
            assert configure(store) == home  # runs find their server again
            del os.environ["PREFECT_HOME"]
    faults.deny_locks(monkeypatch, tmp_path)
    assert configure(store) == store / "prefect-home"  # ServerLocks reports why it cannot be used


def test_user_without_a_name_and_a_home_gets_both(unset, monkeypatch, tmp_path):
    def unknown(uid):
        raise KeyError(uid)

    for name in ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    home = configure(tmp_path / "store")
    assert home == Path.home() == tmp_path / "store/prefect-home"
    assert getpass.getuser() == str(os.geteuid())
