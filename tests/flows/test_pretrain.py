"""Which steps run again after a change of the profile, and after each kind of corruption."""

import json
import logging
import shutil
import time
from pathlib import Path

import pytest

from profiles.errors import ProfileError
from tasks.reporting.format import format_count
from tests import s3
from tests.flows.micro import exported, losses, shown

STEPS = ["plan", "graphs", "tokenizer", "dataset", "checkpoint", "train", "evaluate", "export", "report"]
WORK = ["tokenizer", "dataset", "train", "evaluate", "export"]


@pytest.fixture(scope="module")
def finished(pretrain, tmp_path_factory):
    """A store with one finished run, and the flow's result."""
    store = tmp_path_factory.mktemp("finished") / "store"
    return store, pretrain(store, torchrun=True)


@pytest.fixture
def store(finished, tmp_path):
    """A copy of the finished run's store, to modify."""
    return shutil.copytree(finished[0], tmp_path / "store")


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.INFO)
    return lambda: [record.getMessage() for record in caplog.records]


def done(result: dict) -> list[str]:
    return [step for step, how in result["how"].items() if how == "done" and step not in ("plan", "report")]


def test_first_run_executes_every_step(finished):
    _, result = finished
    assert list(result["how"]) == STEPS
    assert done(result) == WORK
    assert result["how"]["checkpoint"] == result["how"]["graphs"] == "skipped"
    folder = Path(result["folder"])
    for name in (
        "profile.yaml",
        "metrics.jsonl",
        "tensorboard",
        "checkpoints/step_6/complete.json",
        "logs",
        "export",
    ):
        assert (folder / name).exists(), name
    assert "<svg" in Path(result["report"]).read_text()
    assert list(losses(folder)) == [1, 2, 3, 4, 5, 6]


def test_export_loads_generates_and_has_the_evaluated_loss(finished):
    store, result = finished
    (dataset,) = (store / "artifacts/dataset").iterdir()
    loss, text = exported(result["export"], dataset, 32)
    assert loss == pytest.approx(result["validation_loss"], abs=1e-3)
    assert isinstance(text, str)


def test_epochs_train_on_all_data(pretrain, store, caplog):
    batch = ("train.global_batch_size=64", "train.micro_batch_size=64")
    epochs = ("train.steps=null", "train.epochs=1", *batch)
    result = pretrain(store, *epochs, name="epochs")
    assert done(result) == ["train", "evaluate", "export"]
    (corpus,) = (store / "artifacts/dataset").glob("*/corpus.json")
    windows = (sum(entry["tokens"] for entry in json.loads(corpus.read_text())["train"]) - 1) // 32
    steps = -(-windows // 64)
    assert list(losses(store / "runs/epochs")) == list(range(1, steps + 1))
    page = shown("epochs")["run"]
    assert f"All {steps:,} steps are done" in page
    assert f"| tokens | {format_count(steps * 64 * 32)} |" in page
    assert "cannot be rendered" not in caplog.text
    assert done(pretrain(store, *epochs, name="epochs")) == []


def test_second_run_is_cached_except_plan_and_report(pretrain, store):
    result = pretrain(store)
    assert done(result) == []
    assert [step for step, how in result["how"].items() if how == "cached"] == WORK


def test_prefect_shows_cached_and_skipped_steps_as_such(pretrain, store, prefect_server):
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
    from prefect.client.schemas.sorting import FlowRunSort

    pretrain(store)
    with get_client(sync_client=True) as client:
        (run,) = client.read_flow_runs(sort=FlowRunSort.START_TIME_DESC, limit=1)
        shown = {}
        for _ in range(50):  # the server creates task runs from events, with a delay
            filter_ = FlowRunFilter(id=FlowRunFilterId(any_=[run.id]))
            shown = {task.name: task.state_name for task in client.read_task_runs(flow_run_filter=filter_)}
            if len(shown) == len(STEPS) and not {"Pending", "Running"} & {*shown.values()}:
                break
            time.sleep(0.2)
    assert shown["checkpoint"] == "Skipped"
    assert shown["train micro, 6 steps"] == "Cached"


@pytest.mark.parametrize(
    ("pattern", "step", "damage"),
    [
        ("artifacts/tokenizer/*/tokenizer.json", "tokenizer", "changed"),
        ("artifacts/tokens/*/train.bin", "dataset", "truncated"),
        ("artifacts/dataset/*/corpus.json", "dataset", "deleted"),
        ("runs/micro/checkpoints/step_6/*.distcp", "train", "truncated"),
        ("runs/micro/checkpoints/step_6/*.distcp", "train", "changed"),
        ("artifacts/evaluation/*/evaluation.json", "evaluate", "deleted"),
        ("runs/micro/export/model.safetensors", "export", "changed"),
        ("runs/micro/export/tokenizer.json", "export", "deleted"),
    ],
)
def test_corrupted_file_is_named_and_only_its_step_runs_again(pretrain, store, said, pattern, step, damage):
    path = next(store.glob(pattern))
    contents = path.read_bytes()
    if damage == "deleted":
        path.unlink()
    else:
        path.write_bytes(
            contents[:-7] if damage == "truncated" else contents[:-1] + bytes([contents[-1] ^ 1])
        )
    before = losses(store / "runs/micro")
    result = pretrain(store)
    assert done(result) == [step]
    assert any(path.name in line and "again" in line for line in said())
    assert losses(store / "runs/micro") == before
    assert done(pretrain(store)) == []


def test_sequence_length_change_keeps_only_the_tokenizer(pretrain, store):
    assert done(pretrain(store, "train.sequence_length=16")) == ["dataset", "train", "evaluate", "export"]


def test_learning_rate_change_trains_again_and_keeps_the_old_run(pretrain, store, said):
    before = losses(store / "runs/micro")
    result = pretrain(store, "train.learning_rate=1e-2")
    assert done(result) == ["train", "evaluate", "export"]
    assert losses(store / "runs/micro") != before
    assert losses(store / "runs/micro~1") == before
    assert any("micro~1" in line for line in said())


def test_renamed_run_reuses_the_data_and_has_the_same_losses(pretrain, store):
    result = pretrain(store, name="other")
    assert done(result) == ["train", "evaluate", "export"]
    assert losses(store / "runs/other") == losses(store / "runs/micro")


@pytest.mark.parametrize(
    "override",
    ["checkpoint.every=3", "parallel.zero1=false", "cluster.retries=1", "evaluate.every=1"],
)
def test_settings_without_numerical_effect_keep_all_steps_cached(pretrain, store, override):
    assert done(pretrain(store, override)) == []


def test_user_metrics_are_evaluated_on_a_finished_run_and_reported(
    pretrain, store, said, monkeypatch, tmp_path
):
    own = tmp_path / "counts.py"
    own.write_text("def share(logits, targets):\n    return (targets >= 0).sum().float() / 4\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    result = pretrain(store, "evaluate.metrics=[counts:share]", "evaluate.every=0")
    assert done(result) == ["evaluate"]
    (evaluated,) = (step for step in result["steps"] if step["step"] == "evaluate")
    assert evaluated["summary"]["metrics"] == {"share": pytest.approx(0.25)}
    assert any("perplexity" in line and "share 0.2500" in line for line in said())
    page = Path(result["report"])
    assert "<th>share</th><td>0.2500</td>" in page.read_text()
    assert json.loads(page.with_suffix(".json").read_text())["evaluation"]["metrics"].keys() == {"share"}
    assert done(pretrain(store, "evaluate.metrics=[counts:share]")) == []
    own.write_text(own.read_text().replace("4", "5"))
    assert done(pretrain(store, "evaluate.metrics=[counts:share]")) == ["evaluate"]


def test_run_starts_from_pretrained_weights(pretrain, store, finished):
    source = f"init.from={finished[1]['export']}"
    result = pretrain(store, source, name="continued")
    assert done(result) == ["checkpoint", "train", "evaluate", "export"]
    former, continued = (losses(store / "runs" / name) for name in ("micro", "continued"))
    assert continued[1] == pytest.approx(former[6], abs=0.15)  # starts at the first run's final loss
    assert continued[1] < former[1] - 0.3
    assert done(pretrain(store, source, name="continued")) == []
    (path,) = store.glob("artifacts/checkpoint/*/__0_0.distcp")
    path.write_bytes(path.read_bytes()[:-1])
    assert done(pretrain(store, source, name="continued")) == ["checkpoint"]
    assert not list((store / "work").glob("checkpoint-*"))


def test_prefect_records_without_artifacts_are_ignored(pretrain, store):
    shutil.rmtree(store / "artifacts/tokenizer")
    assert done(pretrain(store)) == ["tokenizer"]


def test_artifacts_without_prefect_records_are_reused(pretrain, store):
    shutil.rmtree(store / "prefect")
    assert done(pretrain(store)) == []


def test_tokenizer_larger_than_the_model_is_rejected_after_its_step(pretrain, profile, finished, tmp_path):
    (tokenizer,) = (finished[0] / "artifacts/tokenizer").iterdir()
    source = (f"tokenizer.source={tokenizer}", "tokenizer.vocabulary_size=null", "model.vocab_size=280")
    with pytest.raises(ProfileError, match=r"model.vocab_size = 280: the tokenizer has 300 tokens"):
        pretrain(tmp_path / "store", *source)
    assert not (tmp_path / "store/artifacts/tokens").exists()


def test_s3_store_keeps_artifacts_and_records(pretrain, tmp_path, monkeypatch):
    import s3fs

    with s3.bucket(monkeypatch) as address:
        work = f"cluster.work_dir={tmp_path / 'work'}"
        first = pretrain(f"{address}/store", work)
        assert done(first) == WORK
        assert Path(first["export"]) == tmp_path / "work/runs/micro/export"
        kept = s3fs.S3FileSystem().find(f"{address}/store")
        assert sum("/prefect/" in path for path in kept) == len(WORK)
        assert any(path.endswith("tokenizer.json") for path in kept)
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

        # Another identity: the previous run and its checkpoints are renamed on S3, too.
        assert "train" in done(pretrain(f"{address}/store", work, "train.steps=4"))
        kept = s3fs.S3FileSystem().find(f"{address}/store/runs")
        assert f"{run}~1/checkpoints/step_6/complete.json" in kept
        assert f"{run}/checkpoints/step_6/complete.json" not in kept
