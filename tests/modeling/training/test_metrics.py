"""metrics.jsonl on resume and after write errors, and TensorBoard tags."""

import errno
import json
import os
from pathlib import Path

import pytest

from modeling.supervision.telemetry import Telemetry
from modeling.training.metrics import MetricsWriter, tag
from parallel.device import resolve


def test_resume_drops_corrupted_and_later_rows(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b'{"step": 1}\n{"step": 2, "lo\n5\n{}\n\0\xff\n{"step": "two"}\n{"step": 2}\n{"step": 3}\n'
    )
    metrics = MetricsWriter(tmp_path, step=2, total_steps=9)
    metrics.write({"step": 3, "loss": 5.0})
    metrics.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_restart_from_the_beginning_hides_earlier_points_from_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for last in (3, 1):
        metrics = MetricsWriter(tmp_path, step=0, total_steps=9)
        for step in range(1, last + 1):
            metrics.write({"step": step, "loss": 5.0})
        metrics.close()
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [event.step for event in board.Scalars("loss/loss")] == [1]


class Failing:
    """A file whose writes fail."""

    def __init__(self, file, code: int) -> None:
        self._file, self._code = file, code

    def write(self, line: bytes) -> int:
        raise OSError(self._code, os.strerror(self._code))

    def __getattr__(self, name: str):
        return getattr(self._file, name)


def written(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def metrics(tmp_path) -> MetricsWriter:
    (tmp_path / "attempt").write_text("1")
    metrics = MetricsWriter(tmp_path, 0, 9)
    metrics.write({"step": 1})
    return metrics


def test_buffered_rows_are_written_when_the_file_is_closed(metrics, tmp_path):
    ours, metrics.file = metrics.file, Failing(metrics.file, errno.ENOSPC)
    metrics.write({"step": 2})
    metrics.write({"step": 3})
    assert written(tmp_path) == [1]
    metrics.file = ours  # the disk has room again
    metrics.close()
    assert written(tmp_path) == [1, 2, 3]


def test_lost_rows_are_counted(metrics, tmp_path, caplog):
    metrics.file = Failing(metrics.file, errno.ENOSPC)
    metrics.write({"step": 2})
    metrics.write({"step": 3})
    metrics.close()
    assert "metrics.jsonl: buffered rows are lost (2): [Errno 28] No space left on device" in caplog.text


def test_stale_handle_is_reopened(metrics, tmp_path):
    metrics.file = Failing(metrics.file, errno.ESTALE)
    metrics.write({"step": 2})
    metrics.write({"step": 3})
    metrics.close()
    assert written(tmp_path) == [1, 2, 3]


@pytest.mark.parametrize("same_inode", [False, True])
def test_stale_handle_of_a_file_that_another_attempt_replaced_is_not_reopened(
    metrics, tmp_path, caplog, same_inode
):
    (tmp_path / "attempt").write_text("2" if same_inode else "1")
    if not same_inode:
        MetricsWriter(tmp_path, 1, 9).close()
    metrics.file = Failing(metrics.file, errno.ESTALE)
    metrics.write({"step": 2})
    metrics.close()
    assert written(tmp_path) == [1]
    assert "buffered rows are lost (1)" in caplog.text


def test_user_metrics_and_telemetry_have_separate_tags():
    assert tag("accuracy") == "evaluation/accuracy"
    assert tag("device_celsius") == "device/device_celsius"
    telemetry = Telemetry(resolve("cpu"))
    readings = telemetry.readings()
    telemetry.close()
    assert {tag(name).partition("/")[0] for name in readings} == {"device", "memory"}
