"""A run's folder mirrored to a remote store while it is written to."""

import time

import s3fs

from tasks.store.backends import ObjectBackend
from tasks.store.sync import RunSync
from tests import s3


def eventually(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_what_changes_is_copied_beside_the_work_and_at_its_end(tmp_path, monkeypatch, caplog):
    with s3.bucket(monkeypatch) as address:
        files, run = s3fs.S3FileSystem(use_listings_cache=False), f"{address}/store/runs/r"
        (tmp_path / "checkpoints/step_1").mkdir(parents=True)
        (tmp_path / "checkpoints/step_1/complete.json").write_text("{}")
        (tmp_path / "logs").mkdir()
        (tmp_path / "metrics.jsonl").write_text("1\n")
        with RunSync(tmp_path, ObjectBackend(f"{address}/store"), "runs/r", interval=0.05):
            eventually(lambda: files.exists(f"{run}/metrics.jsonl"))
            (tmp_path / "metrics.jsonl").write_text("1\n2\n")
            eventually(lambda: files.cat_file(f"{run}/metrics.jsonl") == b"1\n2\n")
            (tmp_path / "logs/last.log").write_text("written at the end")
        assert files.cat_file(f"{run}/logs/last.log") == b"written at the end"
        assert not files.exists(f"{run}/checkpoints")
        # Copied by hand, so that the file is surely recorded as copied when it is taken away there.
        with RunSync(tmp_path, ObjectBackend(f"{address}/store"), "runs/r", interval=3600) as sync:
            sync.upload()
            files.rm(f"{run}/metrics.jsonl")
            (tmp_path / "logs/last.log").write_text("changed since")
        assert files.cat_file(f"{run}/logs/last.log") == b"changed since"
        assert not files.exists(f"{run}/metrics.jsonl")  # unchanged, so not copied again
    # With the store out of reach the work goes on.
    with RunSync(tmp_path, ObjectBackend(f"{address}/store"), "runs/r", interval=60):
        pass
    assert "runs/r: cannot sync with the store" in caplog.text


def test_a_folder_store_needs_none(tmp_path):
    with RunSync(tmp_path, None, "runs/r") as sync:
        sync.upload()
