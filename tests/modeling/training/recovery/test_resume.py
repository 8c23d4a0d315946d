"""Requests to resume are applied once, and never start a run over that lost its checkpoints."""

import errno
import json
import shutil
from pathlib import Path

import pytest

from modeling.training.recovery.resume import AppliedRequest, Rejected, ResumeRequest
from parallel.checkpoint import locations


@pytest.fixture
def location(tmp_path) -> Path:
    """A run's checkpoints, of steps 4, 8 and 12."""
    for step in (4, 8, 12):
        write(tmp_path / "checkpoints", step)
    return tmp_path / "checkpoints"


def write(location: Path, step: int) -> None:
    (location / f"step_{step}").mkdir(parents=True)
    (location / f"step_{step}/complete.json").write_text("{}")


def start(location: Path, request: ResumeRequest) -> AppliedRequest:
    """Start an attempt."""
    applied = AppliedRequest(location.parent / "resumed.json", location, request)
    remaining = applied.apply(dict(locations.complete_checkpoints(location)))
    assert list(remaining) == steps(location)
    return applied


def steps(location: Path) -> list[int]:
    return [step for step, _ in locations.complete_checkpoints(location)]


def test_an_applied_request_does_not_start_over_after_corruption(location):
    locations.quarantine(location, 12, "truncated")
    for _ in range(2):  # the corrupted checkpoint is known
        start(location, ResumeRequest("none")).reject_lost_training()
    assert steps(location) == []
    write(location, 12)
    locations.quarantine(location, 12, "truncated")
    with pytest.raises(
        Rejected, match=r"step_12, step_12~1 are corrupted, .* or remove .*/resumed\.json, so"
    ):
        start(location, ResumeRequest("none")).reject_lost_training()


def test_a_checkpoint_that_is_corrupted_when_it_is_requested_is_not_replaced_by_a_new_start(location):
    applied = start(location, ResumeRequest(4))
    locations.quarantine(location, 4, "truncated")
    with pytest.raises(Rejected, match=r"step_4 are corrupted, .* or set checkpoint.resume=none to"):
        applied.reject_lost_training()


@pytest.mark.parametrize("moved", [0, 1, 3])
@pytest.mark.parametrize("again", [ResumeRequest(weights=True), ResumeRequest()])
def test_an_attempt_killed_while_it_moves_checkpoints_aside_is_completed_by_the_next(
    location, monkeypatch, moved, again
):
    def killed(location, steps, aside):
        move(location, steps[:moved], aside)
        raise KeyboardInterrupt

    move = locations.move_aside
    with monkeypatch.context() as patch:
        patch.setattr(locations, "move_aside", killed)
        with pytest.raises(KeyboardInterrupt):
            start(location, ResumeRequest(weights=True))
    for _ in range(2):
        applied = start(location, again)
        applied.reject_lost_training()
        assert applied.weights == f"{location}~1/step_12"
        assert (steps(location), steps(Path(f"{location}~1"))) == ([], [4, 8, 12])
    write(location, 4)
    start(location, again)
    assert steps(location) == [4]


def test_checkpoints_move_aside_to_another_file_system(location, monkeypatch):
    def rename(path, target):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    (location / "step_8/data").write_text("weights")
    monkeypatch.setattr(Path, "rename", rename)
    for function in ("_copy_file", "discard"):  # before and after the copy
        with monkeypatch.context() as patch:
            patch.setattr(locations, function, killed)
            with pytest.raises(KeyboardInterrupt):
                start(location, ResumeRequest(4))
        assert steps(location) == [4, 8, 12]
    start(location, ResumeRequest(4))
    aside = Path(f"{location}~1")
    assert (steps(location), steps(aside)) == ([4], [8, 12])
    assert (aside / "step_8/data").read_text() == "weights"
    assert [path.name for path in location.iterdir()] == ["step_4"]


def test_a_request_is_followed_again_after_a_start_without_it(location):
    start(location, ResumeRequest(8))
    write(location, 12)
    start(location, ResumeRequest(8))
    assert steps(location) == [4, 8, 12]
    start(location, ResumeRequest())
    start(location, ResumeRequest(8))
    assert steps(location) == [4, 8]


def test_missing_checkpoints_are_not_replaced_by_a_new_start(location, tmp_path):
    start(location, ResumeRequest()).record_saved()
    location.rename(tmp_path / "elsewhere")
    location.symlink_to(tmp_path / "unmounted")
    message = (
        r"checkpoints \(a link to .*/unmounted\): no checkpoint, although .* or set checkpoint.resume=none to"
    )
    with pytest.raises(Rejected, match=message):
        start(location, ResumeRequest()).reject_lost_training()
    with pytest.raises(Rejected, match=message):
        start(location, ResumeRequest(weights=True))
    location.unlink()
    (tmp_path / "elsewhere").rename(location)  # mounted again: the request has not been applied yet
    assert start(location, ResumeRequest(weights=True)).weights == f"{location}~1/step_12"


def test_a_run_that_is_started_over_may_have_no_checkpoint_until_its_next_save(location):
    start(location, ResumeRequest()).record_saved()
    shutil.rmtree(location)
    for request in (ResumeRequest("none"), ResumeRequest("none"), ResumeRequest()):
        start(location, request).reject_lost_training()
    start(location, ResumeRequest("none")).record_saved()
    with pytest.raises(Rejected, match=r"no checkpoint, .* or remove .*/resumed\.json, so"):
        start(location, ResumeRequest("none")).reject_lost_training()


@pytest.mark.parametrize(
    ("saving", "failed", "is_known"), [((0, 0, 0), 0, False), ((0, 1, 1, 2), 0, True), ((0, 1, 2), 1, False)]
)
def test_metrics_of_a_run_without_record_show_whether_it_has_saved(tmp_path, saving, failed, is_known):
    rows = [{"step": step, "checkpoint_seconds": float(total)} for step, total in enumerate(saving, 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "events.jsonl").write_text('{"event": "not saved"}\n' * failed)
    applied = start(tmp_path / "checkpoints", ResumeRequest())
    if is_known:
        with pytest.raises(Rejected, match="no checkpoint, although this run has saved some"):
            applied.reject_lost_training()
    else:
        applied.reject_lost_training()
