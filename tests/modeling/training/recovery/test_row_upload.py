"""Metrics, events and the attempt are uploaded before a checkpoint is completed."""

import fsspec

from modeling.training.recovery.row_upload import RowUpload


def test_failed_upload_of_metrics_is_a_warning_and_the_next_one_succeeds(tmp_path, monkeypatch, caplog):
    store = fsspec.filesystem("memory")
    upload = RowUpload(tmp_path, "memory://bucket/store/runs/row-upload/checkpoints")
    for name in ("metrics.jsonl", "events.jsonl"):
        (tmp_path / name).write_text(name)
    with monkeypatch.context() as patch:
        patch.setattr(type(store), "put_file", lambda *arguments: 1 / 0)
        upload.begin()
        upload.wait()
    assert "store/runs/row-upload: metrics cannot be uploaded: ZeroDivisionError" in caplog.text
    upload.begin()
    upload.wait()
    for name in ("metrics.jsonl", "events.jsonl"):
        assert store.cat_file(f"/bucket/store/runs/row-upload/{name}") == name.encode()
    upload.close()


def test_attempt_of_a_job_without_a_flow_is_uploaded_last(tmp_path, monkeypatch):
    """A machine that takes over the run counts its attempts from there; an earlier number is rejected."""
    store, names = fsspec.filesystem("memory"), []
    put_file = type(store).put_file

    def record(self, source, target, **options):
        names.append(target.rpartition("/")[2])
        return put_file(self, source, target, **options)

    monkeypatch.setattr(type(store), "put_file", record)
    upload = RowUpload(tmp_path, "memory://bucket/store/runs/requeued/checkpoints")
    for name, text in {"attempt": "12", "metrics.jsonl": "{}\n", "events.jsonl": "{}\n"}.items():
        (tmp_path / name).write_text(text)
    upload.begin()
    upload.wait()
    upload.close()
    assert names == ["metrics.jsonl", "events.jsonl", "attempt"]
    assert store.cat_file("/bucket/store/runs/requeued/attempt") == b"12"
