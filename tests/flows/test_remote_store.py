"""Runs of the main flow whose store is on S3."""

import json
from pathlib import Path

import pytest

from tests import s3
from tests.flows.micro import done, losses


@pytest.mark.s3
def test_s3_store_keeps_artifacts_and_records(pretrain, tmp_path, monkeypatch):
    import s3fs

    with s3.bucket(monkeypatch) as address:
        work = f"cluster.work_dir={tmp_path / 'work'}"
        first = pretrain(f"{address}/store", work)
        assert done(first) == ["tokenizer", "dataset", "train", "evaluate", "export"]
        assert Path(first["export"]) == tmp_path / "work/runs/micro/export"
        kept = s3fs.S3FileSystem().find(f"{address}/store")
        assert any(path.endswith("tokenizer.json") for path in kept)
        alerts = json.loads(s3fs.S3FileSystem().cat_file(f"{address}/store/runs/micro/alerts.json"))
        assert alerts["steps"] == 6  # another machine does not repeat "finished"
        assert done(pretrain(f"{address}/store", work)) == []
        run = f"{address}/store/runs/micro".removeprefix("s3://")
        assert f"{run}/checkpoints/step_6/complete.json" in kept
        assert not (tmp_path / "work/runs/micro/checkpoints").exists()
        assert not any("/export/checkpoints" in path for path in kept)
        for name in ("metrics.jsonl", "report.html", "export/config.json", "logs/train.log"):
            assert f"{run}/{name}" in kept
        elsewhere = pretrain(f"{address}/store", f"cluster.work_dir={tmp_path / 'elsewhere'}")
        assert done(elsewhere) == []
        assert losses(Path(elsewhere["folder"])) == losses(Path(first["folder"]))

        child = pretrain(f"{address}/store", work, name="child", fork="micro@4")
        assert losses(Path(child["folder"])) == losses(Path(first["folder"]))

        # The previous run and its checkpoints are renamed on S3, too.
        assert "train" in done(pretrain(f"{address}/store", work, "train.steps=4", replace=True))
        kept = s3fs.S3FileSystem().find(f"{address}/store/runs")
        assert f"{run}~1/checkpoints/step_6/complete.json" in kept
        assert f"{run}/checkpoints/step_6/complete.json" not in kept
