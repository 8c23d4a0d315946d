"""Metrics and events are uploaded before a checkpoint is completed."""

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
