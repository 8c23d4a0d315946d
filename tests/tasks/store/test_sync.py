"""RunSync uploads a run folder while it is written."""

import json

import fsspec
import pytest
import s3fs

from profiles.files import state_files
from tasks.launchers.conformance import wait
from tasks.store import sync
from tasks.store.backends.objects import ObjectBackend
from tasks.store.sync import RunSync
from tests import s3


@pytest.mark.s3
@pytest.mark.slow  # a server, and waits for an unreachable store
def test_changed_files_are_uploaded_during_the_block_and_at_its_end(tmp_path, monkeypatch, caplog):
    with s3.bucket(monkeypatch) as address:
        remote, run = s3fs.S3FileSystem(use_listings_cache=False), f"{address}/store/runs/r"
        (tmp_path / "checkpoints/step_1").mkdir(parents=True)
        (tmp_path / "checkpoints/step_1/complete.json").write_text("{}")
        (tmp_path / "logs").mkdir()
        (tmp_path / "metrics.jsonl").write_text("1\n")
        with RunSync(tmp_path, ObjectBackend(f"{address}/store"), "runs/r", interval=0.05):
            wait(lambda: remote.exists(f"{run}/metrics.jsonl"), 60)
            (tmp_path / "metrics.jsonl").write_text("1\n2\n")
            wait(lambda: remote.cat_file(f"{run}/metrics.jsonl") == b"1\n2\n", 60)
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
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    monkeypatch.setattr(state_files, "DELAYS", (0.01,))
    with RunSync(tmp_path, ObjectBackend(f"{address}/store"), "runs/r", interval=60):
        pass
    assert "runs/r: cannot sync with the store" in caplog.text


@pytest.mark.s3
def test_start_of_an_attempt_is_uploaded_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(sync, "POLL", 0.05)
    with s3.bucket(monkeypatch) as address:
        backend = ObjectBackend(f"{address}/store")
        with RunSync(tmp_path, backend, "runs/r", interval=3600):
            (tmp_path / "attempt").write_text("1")
            wait(lambda: backend.read("runs/r/attempt") == b"1", 60)


def test_sync_of_a_local_store_does_nothing(tmp_path):
    with RunSync(tmp_path, None, "runs/r") as sync:
        sync.upload()


def test_longer_copies_in_the_store_are_not_replaced(tmp_path, caplog):
    fsspec.filesystem("memory").store.clear()
    remote = ObjectBackend("memory://bucket/store")

    def machine(name: str, **files: str) -> RunSync:
        for file, text in files.items():
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / file.replace("__", ".")).write_text(text)
        return RunSync(tmp_path / name, remote, "runs/r")

    def stored(file: str) -> bytes:
        return remote.read(f"runs/r/{file}")

    machine("a", attempt="3", metrics__jsonl="1\n2\n3\n4\n", graphs__json="{}", profile__yaml="long").upload()
    assert stored("graphs.json") == b"{}"
    # A truncated copy of the same attempt: its log-like files are kept until they have more, others are replaced.
    cut = machine("b", attempt="3", metrics__jsonl="1\n2", profile__yaml="new")
    cut.upload()
    assert (stored("metrics.jsonl"), stored("profile.yaml")) == (b"1\n2\n3\n4\n", b"new")
    assert "runs/r/metrics.jsonl: has 3 bytes here, 8 in the store; not replaced" in caplog.text
    # A new attempt truncates its metrics to the checkpoint that it resumed from.
    (tmp_path / "b/attempt").write_text("4")
    cut.upload()
    assert stored("metrics.jsonl") == b"1\n2"
    # The first machine is stale from now on.
    machine("a", metrics__jsonl="1\n2\n3\n4\n5\n").upload()
    assert (stored("metrics.jsonl"), stored("attempt")) == (b"1\n2", b"4")
    assert "the store has attempt 4, this folder attempt 3" in caplog.text


def test_run_that_replaced_this_one_in_the_store_is_not_overwritten(tmp_path, caplog):
    fsspec.filesystem("memory").store.clear()
    remote = ObjectBackend("memory://bucket/store")
    for identity, attempt in (("old", "3"), ("new", "1")):  # the new run's attempts are counted from 1
        folder = tmp_path / identity
        folder.mkdir()
        (folder / "run.json").write_text(json.dumps({"identity": identity}))
        (folder / "attempt").write_text(attempt)
    for identity in ("new", "old"):
        RunSync(tmp_path / identity, remote, "runs/r").upload()
    assert remote.read("runs/r/attempt") == b"1"
    assert "runs/r: not uploaded: the store has another run of this name" in caplog.text


def test_large_files_are_uploaded_less_often(tmp_path, monkeypatch):
    monkeypatch.setattr(sync, "LARGE", 10)
    fsspec.filesystem("memory").store.clear()
    remote = ObjectBackend("memory://bucket/store")
    run = RunSync(tmp_path, remote, "runs/r")
    for text in ("started, then more", "started, then more, and more"):
        (tmp_path / "train.log").write_text(text)
        run.upload(postpone_large=True)
    assert remote.read("runs/r/train.log") == b"started, then more"
    run.upload()
    assert remote.read("runs/r/train.log") == b"started, then more, and more"
