"""Requests to resume are applied once, and never start a run over that lost its checkpoints."""

from pathlib import Path

import pytest

from modeling.training.recovery.resume import AppliedRequest, Rejected, ResumeRequest
from parallel.checkpoint import checkpoint


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
    remaining = applied.apply(dict(checkpoint.complete_checkpoints(location)))
    assert list(remaining) == steps(location)
    return applied


def steps(location: Path) -> list[int]:
    return [step for step, _ in checkpoint.complete_checkpoints(location)]


def test_an_applied_request_does_not_start_over_after_corruption(location):
    checkpoint.quarantine(location, 12, "truncated")
    for _ in range(2):  # the corrupted checkpoint is known
        start(location, ResumeRequest("none")).reject_lost_training()
    assert steps(location) == []
    write(location, 12)
    checkpoint.quarantine(location, 12, "truncated")
    with pytest.raises(
        Rejected, match=r"step_12, step_12~1 are corrupted, .* or remove .*/resumed\.json, so"
    ):
        start(location, ResumeRequest("none")).reject_lost_training()


def test_a_checkpoint_that_is_corrupted_when_it_is_requested_is_not_replaced_by_a_new_start(location):
    applied = start(location, ResumeRequest(4))
    checkpoint.quarantine(location, 4, "truncated")
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

    move = checkpoint.move_aside
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "move_aside", killed)
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


def test_a_request_is_followed_again_after_a_start_without_it(location):
    start(location, ResumeRequest(8))
    write(location, 12)
    start(location, ResumeRequest(8))
    assert steps(location) == [4, 8, 12]
    start(location, ResumeRequest())
    start(location, ResumeRequest(8))
    assert steps(location) == [4, 8]
