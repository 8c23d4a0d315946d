"""Fencing of checkpoints without training: rollbacks, claims that fail, and metrics rows of a save."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from modeling.training.recovery.checkpoints import Checkpoints
from parallel.checkpoint import checkpoint, locations
from parallel.checkpoint.saver import StaleAttempt
from profiles.resolve import load
from tests.modeling import micro


@pytest.fixture
def checkpoints(tmp_path) -> Checkpoints:
    """Those of attempt 1, which has saved steps 4 and 8."""
    (tmp_path / "attempt").write_text("1")
    profile = load(str(micro.run_folder(tmp_path) / "profile.yaml"))
    mesh = SimpleNamespace(rank=0, size=1, host=None)
    trainer = SimpleNamespace(profile=profile, leader=True, mesh=mesh, reference_model=None)
    found = Checkpoints(trainer, SimpleNamespace(mesh=mesh), tmp_path, tmp_path / "checkpoints", 1)
    for step in (4, 8):
        (tmp_path / f"checkpoints/step_{step}").mkdir(parents=True)
        (tmp_path / f"checkpoints/step_{step}/complete.json").write_text("{}")
    assert found._prepare_start(None).resumes
    return found


def steps(location: Path) -> list[int]:
    return [step for step, _ in locations.complete_checkpoints(location)]


def take_over(run: Path) -> None:
    (run / "attempt").write_text("2")


@pytest.mark.parametrize("during_load", [False, True])
def test_stale_attempt_discards_no_checkpoint_in_a_rollback(checkpoints, tmp_path, monkeypatch, during_load):
    monkeypatch.setattr(checkpoint, "load", lambda *_: take_over(tmp_path) if during_load else {})
    if not during_load:
        assert checkpoints.roll_back(9) == (8, {})
        take_over(tmp_path)
    with pytest.raises(StaleAttempt, match="attempt 2 has taken over the run"):
        checkpoints.roll_back(8)
    assert steps(tmp_path / "checkpoints") == [4, 8]


@pytest.fixture
def claim(checkpoints, monkeypatch) -> dict[str, Any]:
    """The claim of an attempt that could not write it."""

    def fail(*_: object) -> None:
        raise OSError("unreachable")

    claim = json.loads(locations.claimed_by(checkpoints.location))
    checkpoints._claim = ""
    (checkpoints.location / "owner").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(locations, "claim", fail)
        checkpoints._check_fencing()
    assert locations.claimed_by(checkpoints.location) == ""
    return claim


@pytest.mark.parametrize("claims_again", [False, True])
def test_fencing_works_after_a_failed_claim(checkpoints, claim, claims_again):
    if claims_again:
        checkpoints._check_fencing()
        assert json.loads(locations.claimed_by(checkpoints.location))["attempt"] == 1
    locations.claim(checkpoints.location, json.dumps({**claim, "attempt": 2, "node": "n2"}))
    with pytest.raises(StaleAttempt, match="claimed by attempt 2 on n2"):
        checkpoints._check_fencing()


def test_buffered_metrics_rows_are_written_before_they_are_uploaded(checkpoints):
    calls = Mock()
    checkpoints._saver, checkpoints._rows = calls.saver, calls.rows
    calls.saver.pending = False
    checkpoints.save(12, wait=calls.wait, flush=calls.flush)
    assert [name for name, *_ in calls.method_calls][:3] == ["flush", "saver.begin", "rows.begin"]
