"""RunSync uploads a run folder while it is written."""

import time

import s3fs

from tasks.store.backends import ObjectBackend
from tasks.store.sync import RunSync
from tests import s3


def wait_until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_changed_files_are_uploaded_during_the_block_and_at_its_end(tmp_path, monkeypatch, caplog):
    with s3.bucket(monkeypatch) as address:
        remote, run = s3fs.S3FileSystem(use_listings_cache=False), f"{address}/store/runs/r"
        (tmp_path / "checkpoints/step_1").mkdir(parents=True)
        (tmp_path / "checkpoints/step_1/complete.json").write_text("{}")
        (tmp_path / "logs").mkdir()
        (tmp_path / "metrics.jsonl").write_text("1\n")
        with RunSync(tmp_path, ObjectBackend(f"{address}/store"), "runs/r", interval=0.05):
            wait_until(lambda: remote.exists(f"{run}/metrics.jsonl"))
            (tmp_path / "metrics.jsonl").write_text("1\n2\n")
            wait_until(lambda: remote.cat_file(f"{run}/metrics.jsonl") == b"1\n2\n")
            (tmp_path / "logs/last.log").write_text("written at the end")
        assert remote.cat_file(f"{run}/logs/last.log") == b"written at the end"
        assert not remote.exists(f"{run}/checkpoints")
        # Uploaded explicitly, so that the file is recorded as uploaded before it is removed from the remote.
        with RunSync(tmp_path, ObjectBackend(f"{address}/store"), "runs/r", interval=3600) as sync:
            sync.upload()
            remote.rm(f"{run}/metrics.jsonl")
            (tmp_path / "logs/last.log").write_text("changed since")
        assert remote.cat_file(f"{run}/logs/last.log") == b"changed since"
        assert not remote.exists(f"{run}/metrics.jsonl")  # unchanged, so not uploaded again
    # An unreachable store does not stop the run.
    with RunSync(tmp_path, ObjectBackend(f"{address}/store"), "runs/r", interval=60):
        pass
    assert "runs/r: cannot sync with the store" in caplog.text


def test_sync_of_a_local_store_does_nothing(tmp_path):
    with RunSync(tmp_path, None, "runs/r") as sync:
        sync.upload()
