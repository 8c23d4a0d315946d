"""A run's history: bounded in memory, incremental, and correct after a resume."""

import json

import pytest

from profiles import resolve
from tasks.reporting.downsampling import LIMIT
from tasks.reporting.history import SMOOTHING, History, moving_average, seconds_left


def write(path, steps: int) -> None:
    """Replace the file by rows of so many steps, as a resumed training does."""
    rows = (
        {"step": step, "loss": 10 - step / 1000, "step_seconds": 5.0 if step == 1 else 0.5 + step % 10 / 100}
        | {"tokens_per_second": float(step), "memory_bytes": step % 700, "skipped": step == 7}
        for step in range(1, steps + 1)
    )
    partial = path.with_suffix(".partial")
    partial.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    partial.replace(path)


def test_long_run_is_downsampled(tmp_path):
    steps = 3 * LIMIT + 1
    write(tmp_path / "metrics.jsonl", steps)
    history = History.read(tmp_path)
    losses = history.curve("loss")
    assert LIMIT / 2 <= len(losses) <= LIMIT
    assert all(loss == pytest.approx(10 - step / 1000) for step, loss in losses)
    assert losses[-1][0] > steps - 4
    measured = history.measurements(resolve.load("tiny"))
    assert (measured["steps"], measured["memory_bytes"], measured["skipped"]) == (steps, 699, 1)
    assert measured["training_seconds"] == pytest.approx(5 + 0.545 * (steps - 1), abs=0.5)
    assert measured["step_seconds"] == pytest.approx(0.545, abs=0.011)
    assert measured["tokens_per_second"] == pytest.approx(steps / 2, rel=0.1)
    _, smooth, *_ = history.loss_series(resolve.load("tiny"))
    assert smooth.label == f"training, mean of {21 * 4} steps"


def test_only_new_rows_are_read_until_a_resume_drops_some(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, 50)
    history = History.read(tmp_path)
    with path.open("r+b") as file:
        file.write(b"#")  # would be skipped if it were read again
        file.seek(0, 2)
        for step, loss, tokens in ((20, 1.0, 500), (30, 3.1, 80), (40, 2.9, 80), (50, 3.0, 80)):
            row = {"step": step, "validation_loss": loss, "validation_tokens": tokens}
            file.write(f"{json.dumps(row)}\n".encode())
        file.write(b'{"step": 51, "loss": 4.0, "cold_compiles": 2}\n{"step": 52')
    history.update()
    assert history.measurements(resolve.load("tiny"))["graph_cache_misses"] == 2  # by its former name
    assert (history.steps, history.last["loss"]) == (51, 4.0)
    assert history.last_evaluation["validation_loss"] == 3.0
    assert history.lowest_evaluation["validation_loss"] == 2.9  # of as many tokens

    write(path, 40)
    history.update()
    assert (history.steps, history.last["step"], history.last_evaluation) == (40, 40, None)
    assert [step for step, _ in history.curve("loss")] == list(range(1, 41))


def test_smoothed_curve_has_every_step_and_does_not_follow_the_last_points():
    noisy = [(step, 1.0 if step < 60 else 9.0) for step in range(1, 61)]
    smooth = moving_average(noisy)
    assert [step for step, _ in smooth] == list(range(1, 61))
    assert max(value for _, value in smooth) == pytest.approx(1 + 8 / (SMOOTHING + 1))


def test_smoothed_curve_starts_at_the_first_loss_and_follows_a_steep_start():
    falling = [(step, 10.0 - step) for step in range(60)]
    smooth = [value for _, value in moving_average(falling)]
    assert smooth[:50] == pytest.approx([value for _, value in falling[:50]])


def test_time_left_is_at_the_pace_of_the_latest_steps(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = (
        {"step": step, "loss": 1.0, "step_seconds": 100.0 if step <= 40 else 2.0} for step in range(1, 61)
    )
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    recent = History.read(tmp_path).recent
    assert seconds_left(recent, 100) == 40 * 2.0
    assert seconds_left(recent, 60) is None


@pytest.mark.parametrize("seconds", [(6.0, 0.5), (0.5, 6.0), (6.0, 0.5, 0.5), (0.5, 0.5, 6.0, 0.5)])
def test_time_left_excludes_the_warm_up_of_the_first_step_after_a_start_or_a_resume(seconds):
    rows = [{"step": step, "step_seconds": value} for step, value in enumerate(seconds, 1)]
    assert seconds_left(rows, 10) == 0.5 * (10 - len(rows))
    assert seconds_left(rows[:1], 10) is None  # perhaps nothing but warm-up
