"""LogFollower on a file that another process appends to, truncates and replaces."""

import json

import pytest

from profiles.files import jsonl
from profiles.files.jsonl import LogFollower, is_metrics, last_row


def test_reads_only_new_complete_lines(tmp_path):
    path = tmp_path / "file"
    follower = LogFollower(path)
    assert follower.lines() == []
    path.write_text("one\ntw")
    assert follower.lines() == ["one"]
    assert follower.lines() == []
    with path.open("a") as file:
        file.write("o\nthree\n")
    assert follower.lines() == ["two", "three"]


def test_truncated_file_is_read_from_the_start(tmp_path):
    path = tmp_path / "file"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    follower = LogFollower(path)
    assert [row["step"] for row in follower.rows()] == [1, 2, 3]
    path.write_text('{"step": 1}\n')
    assert [row["step"] for row in follower.rows()] == [1]


def test_replaced_file_is_read_from_the_start(tmp_path):
    path = tmp_path / "file"
    path.write_text("old\n")
    follower = LogFollower(path)
    follower.lines()
    other = tmp_path / "other"
    other.write_text("new, and longer\n")
    other.replace(path)
    assert follower.lines() == ["new, and longer"]


def test_corrupted_lines_are_skipped_with_one_warning(tmp_path, caplog):
    path = tmp_path / "file"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "lo{"step": 3}\n\0\0\xff\n5\n{"step": 4}\n')
    follower = LogFollower(path)
    for _ in range(2):  # as a display that redraws the whole curve does
        assert [row["step"] for row in LogFollower(path).rows()] == [1, 4]
    assert [row["step"] for row in follower.rows()] == [1, 4]
    (record,) = caplog.records
    assert record.getMessage() == f"{path}: line 2 and 2 more: corrupted; skipped"
    with path.open("a") as file:
        file.write('{"step": 5}\ntorn\n')
    assert [row["step"] for row in follower.rows()] == [5]
    assert caplog.records[-1].getMessage() == f"{path}: line 7: corrupted; skipped"


@pytest.mark.parametrize("block", [1 << 10, 1 << 20])
def test_last_row_is_the_last_complete_one_that_has_the_key(tmp_path, monkeypatch, block):
    monkeypatch.setattr(jsonl, "READ_BYTES", block)
    path = tmp_path / "file"
    assert last_row(path, "loss") is None
    path.write_text('{"step": 1, "loss": 2.0}')
    assert last_row(path, "loss") is None
    rows = [{"step": step, "loss": 1.0, "text": "x" * 100} for step in range(1, 20)]
    rows += [{"step": 19, "validation_loss": 1.0}] * 20
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows) + '{"step": 20, "loss": 1.0')
    assert last_row(path, "loss")["step"] == 19
    assert last_row(path, "accuracy") is None
    assert len(list(LogFollower(path).rows())) == 39


def test_corrupted_rows_of_metrics_are_skipped(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 1, "loss": 5.5, "mfu": null, "skipped": false, "rank_seconds": [1.0]}\n'
        '{"loss": 5.5}\n{"step": 3, "loss": "5.5"}\n{"step": null, "loss": 5.5}\n{"step": 5, "validation_loss": NaN}\n'
    )
    assert [row["step"] for row in LogFollower(path).rows(is_metrics)] == [1, 5]
    assert [record.getMessage() for record in caplog.records] == [
        f"{path}: line 2 and 2 more: corrupted; skipped"
    ]
