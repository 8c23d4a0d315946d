"""Functions that a profile names are found in the working folder without running them, or rejected."""

import pytest

from profiles import resolve
from profiles.errors import ProfileError


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A working folder with a user module."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("raise RuntimeError('no code is run')")
    (tmp_path / "package" / "mine.py").write_text("from math import exp\ndef loss(logits, targets): ...\n")
    monkeypatch.chdir(tmp_path)


def test_user_functions_are_found_without_running_them(mine):
    profile = resolve.load("tiny", ["train.loss=package.mine:loss", "evaluate.metrics=['package.mine:exp']"])
    resolve.check_start(profile)


@pytest.mark.parametrize(
    ("override", "reason", "choices"),
    [
        ("train.loss=package.none:loss", "there is no module package.none", ()),
        ("train.loss=tasks:loss", "tasks is a module of Trainshed; rename the file", ()),
        ("train.loss=package.mine:los", "mine.py has no los", ("package.mine:loss",)),
        ("evaluate.metrics=['package.mine:exp', 'package.mine:exp']", "another metric", ()),
    ],
)
def test_invalid_user_functions_are_rejected(mine, override, reason, choices):
    profile = resolve.load("tiny", [override])
    resolve.check(profile)  # it can be planned
    with pytest.raises(ProfileError) as rejected:
        resolve.check_start(profile)
    assert reason in rejected.value.reason
    assert rejected.value.choices == choices
