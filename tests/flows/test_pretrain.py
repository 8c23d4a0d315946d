"""Which steps run again after a change of the profile, and after each kind of corruption."""

import json
import logging
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import get_args

import pytest

from flows.cli.main import main
from flows.runner import retries
from modeling.planning.planner import plan
from profiles import resolve
from profiles.check import with_value
from profiles.errors import ProfileError
from profiles.files import state_files
from tasks import completed
from tasks.keys import file_digest
from tasks.reporting.format import format_bytes, format_count
from tasks.store import activities
from tasks.store.garbage import find_garbage
from tasks.store.store import Store
from tests import faults
from tests.docs.test_extending import EXAMPLES
from tests.flows.micro import done, exported, losses, settings, shown

WORK = ["tokenizer", "dataset", "train", "evaluate", "export"]
STEPS = ["plan", "graphs", "resolve", "tokenizer", "checkpoint", *WORK[1:], "report"]


@pytest.fixture
def store(finished, tmp_path):
    """A copy of the finished run's store, to modify."""
    return shutil.copytree(finished[0], tmp_path / "store")


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.INFO)
    return lambda: [record.getMessage() for record in caplog.records]


def test_first_run_executes_every_step(finished):
    _, result = finished
    assert list(result["how"]) == STEPS
    assert done(result) == WORK
    assert result["how"]["checkpoint"] == result["how"]["graphs"] == "skipped"
    folder = Path(result["folder"])
    marker = "checkpoints/step_6/complete.json"
    for name in ("profile.yaml", "metrics.jsonl", "tensorboard", marker, "logs", "export"):
        assert (folder / name).exists(), name
    assert "<svg" in Path(result["report"]).read_text()
    assert list(losses(folder)) == [1, 2, 3, 4, 5, 6]


def test_run_ends_after_the_step_that_it_is_asked_for(pretrain, store, profile, tmp_path, capsys):
    prepared = pretrain(tmp_path / "fresh", "name=new", until="tokenizer")
    assert prepared["how"] == {"plan": "done", "resolve": "done", "tokenizer": "done"}
    assert not (tmp_path / "fresh/runs/new/profile.yaml").exists()
    assert find_garbage(Store(str(tmp_path / "fresh")))[0] == []  # what was prepared is kept
    pretrain(store, "tokenizer.vocabulary_size=290", until="tokenizer", replace=True)
    assert find_garbage(Store(str(store)))[0] == []  # and what the run uses that is to be replaced
    capsys.readouterr()
    assert main(["run", str(profile), "--store", str(store), "--until", "train"]) == 0
    *_, train, _, ended = capsys.readouterr().out.splitlines()
    assert re.match(r"train +cached ", train)
    assert ended == "ended after train; the same command without --until continues there"
    assert not json.loads((store / "runs/micro/alerts.json").read_text())["reports"]
    with pytest.raises(ProfileError, match="until = graph: is not a step of this run; nearest valid: graphs"):
        pretrain(store, until="graph")


def test_unfinished_run_is_exported_again_after_a_rollback_has_replaced_its_checkpoint(
    store, prefect_server, monkeypatch
):
    from flows.export import export

    def copy(context, checkpoint, tokenizer, weights, folder):
        shutil.copytree(context.run_folder / checkpoint, folder)

    monkeypatch.setattr("tasks.steps.export.write_model", copy)
    shutil.rmtree(store / "runs/micro/checkpoints/step_6")
    with pytest.raises(
        ProfileError, match=r"run = micro: is finished, but .*step_6 is missing or incomplete"
    ):
        export("micro", str(store))
    (store / "runs/micro/report.json").unlink()
    marker = store / "runs/micro/checkpoints/step_4/complete.json"
    for text in (marker.read_text(), f"{marker.read_text()}\n"):
        marker.write_text(text)
        assert Path(export("micro", str(store)), marker.name).read_text() == text


def test_export_loads_generates_and_has_the_evaluated_loss(finished):
    store, result = finished
    (dataset,) = (store / "artifacts/dataset").iterdir()
    loss, text = exported(result["export"], dataset, 32)
    assert loss == pytest.approx(result["validation_loss"], abs=1e-3)
    assert isinstance(text, str)


def test_epochs_train_on_all_data_and_many_passes_are_warned_about(pretrain, store, said, caplog):
    batch = ("train.global_batch_size=64", "train.micro_batch_size=64")
    epochs = ("train.steps=null", "train.epochs=5", "evaluate.every=0", *batch)
    result = pretrain(store, *epochs, name="epochs")
    assert done(result) == ["train", "evaluate", "export"]
    (corpus,) = (store / "artifacts/dataset").glob("*/corpus.json")
    windows = (sum(entry["tokens"] for entry in json.loads(corpus.read_text())["train"]) - 1) // 32
    steps = -(-windows * 5 // 64)
    assert list(losses(store / "runs/epochs")) == list(range(1, steps + 1))
    page = shown("epochs")["run"]
    assert f"All {steps:,} steps are done" in page
    assert f"| tokens | {format_count(steps * 64 * 32)} |" in page
    memory = f"{format_bytes(plan(resolve.load(str(store / 'runs/epochs/profile.yaml'))).needs)} of"
    warning = f"{steps:,} steps read the data about "
    assert sum(warning in line for line in said()) == 1
    for shown_in in (page, Path(result["report"]).read_text()):
        assert warning in shown_in
    assert memory in page
    assert any(memory in line for line in said())
    assert "cannot be rendered" not in caplog.text
    assert done(pretrain(store, *epochs, name="epochs")) == []


def test_completed_run_is_answered_without_prefect_and_torch(finished, store, tmp_path):
    _, result = finished
    folder = store / "runs/micro"
    arguments = ["run", str(folder / "profile.yaml"), "--store", str(store), "--json"]
    code = f"import sys; from flows.cli.main import main; code = main({arguments})"
    code += "; sys.exit(code or 'torch' in sys.modules or 'prefect' in sys.modules)"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    options = {"capture_output": True, "text": True, "env": environment, "cwd": tmp_path, "check": True}
    found = json.loads(subprocess.run([sys.executable, "-c", code], **options).stdout)
    for name in ("run", "validation_loss", "perplexity", "evaluation", "before", "parameters"):
        assert found[name] == result[name]
    assert [step["step"] for step in found["steps"] if step["how"] == "cached"] == WORK

    profile, opened = resolve.load(str(folder / "profile.yaml")), Store(str(store))
    assert completed.find(opened, with_value(profile, "train.learning_rate", 1e-4)) is None
    assert completed.find(opened, with_value(profile, "train.steps", 7)) is None
    assert completed.find(opened, profile.model_copy(update={"name": "other"})) is None
    (folder / "export/config.json").write_text("{}")
    assert completed.find(opened, profile) is None


def test_second_run_is_cached_except_plan_and_report_and_prefect_shows_it(pretrain, store, prefect_server):
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
    from prefect.client.schemas.sorting import FlowRunSort

    result = pretrain(store)
    assert done(result) == []
    assert [step for step, how in result["how"].items() if how == "cached"] == WORK
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
    assert shown["train micro to step 6"] == "Cached"


@pytest.mark.parametrize(
    "damage",
    [
        [
            ("artifacts/tokenizer/*/tokenizer.json", "tokenizer", "changed"),
            ("runs/micro/export/tokenizer.json", "export", "deleted"),
        ],
        [
            ("artifacts/tokens/*/train.bin", "dataset", "truncated"),
            ("artifacts/evaluation/*/evaluation.json", "evaluate", "deleted"),
        ],
        [
            ("artifacts/dataset/*/corpus.json", "dataset", "deleted"),
            ("runs/micro/export/model.safetensors", "export", "changed"),
        ],
        [("runs/micro/checkpoints/step_6/*.distcp", "train", "truncated")],
        [("runs/micro/checkpoints/step_6/*.distcp", "train", "changed")],
    ],
    ids=lambda damage: ", ".join(f"{step} {how}" for _, step, how in damage),
)
def test_corrupted_files_are_named_and_only_their_steps_run_again(pretrain, store, said, damage):
    names = []
    for pattern, _, how in damage:
        path = next(store.glob(pattern))
        names.append(path.name)
        contents = path.read_bytes()
        if how == "deleted":
            path.unlink()
        else:
            path.write_bytes(
                contents[:-7] if how == "truncated" else contents[:-1] + bytes([contents[-1] ^ 1])
            )
    before = losses(store / "runs/micro")
    result = pretrain(store)
    assert done(result) == [step for _, step, _ in damage]
    lines = said()
    assert all(any(name in line and "treated as missing" in line for line in lines) for name in names)
    assert losses(store / "runs/micro") == before
    assert done(pretrain(store)) == []


def planned(capsys, store: Path, micro: Path, *overrides: str, run: str = "micro") -> dict:
    """What `trainshed plan --changes` says of these overrides, as JSON, with the outcome of each step."""
    capsys.readouterr()
    options = ["--changes", run, "--store", str(store), "--json"]
    assert main(["plan", str(micro), *settings(*overrides), *options]) == 0
    rerun = json.loads(capsys.readouterr().out)
    rerun["again"] = [step["step"] for step in rerun["steps"] if step["outcome"] not in ("reused", "skipped")]
    return rerun


@pytest.mark.parametrize(
    ("overrides", "other_run"),
    [
        (["checkpoint.every=3", "parallel.data_sharding=none", "cluster.retries=1"], False),
        (["evaluate.by_source=true"], False),
        (["train.sequence_length=16", "checkpoint.every=3"], True),
        (["data.validation_fraction=0.2"], True),
    ],
)
def test_plan_of_changes_names_the_steps_that_run_again(
    pretrain, store, profile, capsys, overrides, other_run
):
    rerun = planned(capsys, store, profile, *overrides)
    assert [change["key"] for change in rerun["changes"]] == sorted(each.split("=")[0] for each in overrides)
    assert bool(rerun["another_run"]) == other_run
    causes = {reason for step in rerun["steps"] for reason in step["reasons"]}
    assert not any("checkpoint.every" in cause for cause in causes)
    assert done(pretrain(store, *overrides, replace=True)) == rerun["again"]


def test_plan_of_changes_tells_an_extended_run_from_another(pretrain, store, profile, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    constant = ("train.schedule=constant", "checkpoint.keep=0")
    pretrain(store, *constant, name="trunk")
    longer = planned(capsys, store, profile, *constant, "train.steps=10", run="trunk")
    assert (longer["again"], longer["another_run"]) == (["train", "evaluate", "export"], [])
    (train,) = (step for step in longer["steps"] if step["step"] == "train")
    assert train["outcome"] == "resumes"
    assert train["reasons"] == ["from step 6 of 10", "train.steps 6 → 10"]
    (other := store / "other.jsonl").write_text((profile.parent / "texts.jsonl").read_text() * 2)
    moved = planned(capsys, store, profile, *constant, f"data.sources.0.path={other}", run="trunk")
    assert (moved["again"], moved["forkable"]) == (WORK, False)  # it has no step left
    shutil.rmtree(store / "runs/trunk/checkpoints/step_6")
    assert planned(capsys, store, profile, *constant, run="trunk")["again"] == ["train", "evaluate", "export"]

    options = ["--changes", "trunk", "--store", str(store)]
    other = settings(*constant, "train.learning_rate=1e-2", "train.steps=8")
    assert main(["plan", str(profile), *other, *options]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^train +runs again +train.learning_rate 0.003 → 0.01$", out, re.M)
    assert f"trainshed fork trunk@4 trunk-2 --set {' --set '.join(other[1::2])} --store {store}" in out
    assert main(["plan", str(profile), "--changes", "trunc", "--store", str(store)]) == 2
    assert "nearest valid: trunk" in capsys.readouterr().err


def test_other_mathematics_under_the_same_name_is_rejected_with_commands(pretrain, store):
    before = losses(store / "runs/micro")
    # At once, though another process uses the run.
    with activities.begin(Store(str(store)), "run", "micro"), pytest.raises(ProfileError) as rejected:
        pretrain(store, "train.learning_rate=1e-2", "train.seed=7", "train.steps=8")
    words = str(rejected.value)
    assert "at step 6 with other settings" in words
    assert "train.seed is 1234 there, 7 here" in words
    assert "train.learning_rate is 0.003 there, 0.01 here" in words
    _, _, named, continues, forked, _, replaced = words.splitlines()
    settings = f"--set train.learning_rate=1e-2 --set train.seed=7 --set train.steps=8 --store {store}"
    assert named.endswith(f"micro.yaml {settings} --name micro-2")
    assert continues == "  continue from its step 6"
    assert forked == f"    trainshed fork micro@6 micro-2 {settings}"
    assert replaced.endswith(f"{settings} --replace")
    assert losses(store / "runs/micro") == before

    result = pretrain(store, "train.learning_rate=1e-2", replace=True)
    assert done(result) == ["train", "evaluate", "export"]
    assert losses(store / "runs/micro") != before
    assert losses(store / "runs/micro~1") == before


def test_damaged_records_of_a_finished_run_are_written_again_or_left_out(pretrain, finished, store, said):
    folder, wrong = (
        store / "runs/micro",
        json.dumps({"steps": [1], "validation_loss": "low", "identifier": 7}),
    )
    ignored = ("forecast.json", "before.json", "alerts.json", "artifacts.json")
    for name in (*ignored, "inputs.json", "report.json", "plan.json", "evaluations.jsonl", "resumed.json"):
        (folder / name).write_text(wrong)
    result = pretrain(store)
    assert done(result) == []
    assert result["validation_loss"] == finished[1]["validation_loss"]
    for name in ignored:
        assert any(f"{folder / name}: corrupted" in line for line in said()), name
    again, before = (
        json.loads((each / "runs/micro/inputs.json").read_text()) for each in (store, finished[0])
    )
    assert again == before
    assert json.loads((folder / "report.json").read_text())["forecast"] is None
    (folder / "lock.json").write_text(wrong)
    with pytest.raises(
        state_files.CorruptedState, match=r"runs/micro/lock\.json: not a lockfile: .*; --update"
    ):
        pretrain(store)


def test_run_over_a_randomly_failing_store_ends_like_an_undisturbed_one(
    pretrain, finished, tmp_path, monkeypatch
):
    monkeypatch.setattr(state_files, "DELAYS", (0.0, 0.0, 0.0))
    monkeypatch.setattr(retries, "RETRIES", 50)
    monkeypatch.setattr(retries, "DELAYS", {"retry_delay_seconds": 0})
    store, fault = tmp_path / "store", faults.Once(0, share=0.05)
    with monkeypatch.context() as patch:
        faults.inject(patch, store, fault)
        result = pretrain(store)
    assert fault.count > 20
    assert {*done(result)} <= {*WORK}  # a step that failed after publishing is found in the store
    assert losses(store / "runs/micro") == losses(finished[0] / "runs/micro")
    for name in ("model.safetensors", "tokenizer.json"):
        assert file_digest(store / "runs/micro/export" / name) == file_digest(
            finished[0] / "runs/micro/export" / name
        )
    assert not (store / "quarantine").exists()
    assert done(pretrain(store)) == []


def test_a_finished_run_is_extended_where_its_schedule_allows_it(pretrain, store):
    constant = ("train.schedule=constant", "checkpoint.keep=0")
    pretrain(store, *constant, "train.steps=10", name="at-once")
    assert done(pretrain(store, *constant, name="extended")) == ["train", "evaluate", "export"]
    with pytest.raises(ProfileError, match=r"train.warmup_steps is 2 there, 1 here"):
        pretrain(store, *constant, "train.steps=10", "train.warmup_steps=1", name="extended")
    result = pretrain(store, *constant, "train.steps=10", "train.spike_factor=9.0", name="extended")
    assert done(result) == ["train", "evaluate", "export"]
    assert losses(store / "runs/extended") == losses(store / "runs/at-once")
    with pytest.raises(ProfileError, match=r"train.steps is 10 there, 6 here"):
        pretrain(store, *constant, name="extended")


def test_a_fork_continues_its_parent_and_records_it_and_a_tracker_follows(
    pretrain, store, tmp_path, monkeypatch, capsys
):
    before = losses(store / "runs/micro")
    with pytest.raises(
        ProfileError, match="no complete checkpoint of step 5; nearest valid: micro@4, micro@6"
    ):
        pretrain(store, name="child", fork="micro@5")
    with pytest.raises(ProfileError, match=r"train.global_batch_size = 8: .* nearest valid: 4"):
        pretrain(store, "train.global_batch_size=8", name="child", fork="micro@4")
    with pytest.raises(ProfileError, match=r"micro: is the parent's own; .* nearest valid: micro-2"):
        pretrain(store, name="micro", fork="micro@4")
    assert done(pretrain(store, name="same", fork="micro@4")) == ["train", "evaluate", "export"]
    assert losses(store / "runs/same") == before  # the optimizer and the data position are the parent's
    monkeypatch.chdir(tmp_path)
    (tmp_path / "json_tracker.py").write_text(EXAMPLES["json_tracker"][0])
    settings = ("train.learning_rate=1e-2", "train.steps=8", "tracking.trackers=[json_tracker:JsonTracker]")
    pretrain(store, *settings, name="child", fork="micro@4")
    first, *tracked = map(json.loads, (tmp_path / "child.tracked.jsonl").read_text().splitlines())
    assert first == {"profile": "micro", "resumes": False}
    assert [(row["step"], row["loss"]) for row in tracked if row.get("loss")] == [
        *losses(store / "runs/child").items()
    ]
    files = {"profile": "profile.yaml"}, {"report": "report.html"}, {"comparison": "compare.html"}
    assert tracked[-4:] == [*files, {"state": "finished"}]
    alerts = json.loads((store / "runs/child/alerts.json").read_text())
    # flows/alerts emitted all of the run, which has a report.
    assert (alerts["checkpoint"], alerts["steps"], alerts["reports"]) == (8, 8, True)
    child = losses(store / "runs/child")
    assert [child[step] for step in (1, 2, 3, 4)] == [before[step] for step in (1, 2, 3, 4)]
    assert child[6] != before[6]
    assert len(child) == 8
    steps = json.loads((store / "runs/child/report.json").read_text())["steps"]
    assert {each["step"]: each["note"] for each in steps}["checkpoint"] == "init.from is null"
    (warning,) = json.loads((store / "runs/child/plan.json").read_text())["warnings"]
    assert warning.startswith(
        "the learning rate rises from 1.65e-03, at step 4 of micro, to 5.15e-03 at step 5"
    )
    capsys.readouterr()
    assert main(["runs", "--store", str(store)]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert re.search(r"child +finished +8 of 8 +\d\.\d{4} .* micro@4$", lines["child"])
    assert re.search(r"micro +finished +6 of 6 ", lines["micro"])


def test_run_keeps_its_locked_data_until_it_is_updated(pretrain, store, profile, tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    shutil.copy(profile.with_name("texts.jsonl"), texts / "a.jsonl")
    growing = f"data.sources=[{{kind: files, path: {texts}}}]"
    pretrain(store, growing, name="growing")
    (texts / "b.jsonl").write_text('{"text": "more"}\n' * 50)
    assert done(pretrain(store, growing, name="growing")) == []
    with pytest.raises(ProfileError, match="another dataset"):
        pretrain(store, growing, name="growing", update=True)
    (texts / "a.jsonl").write_text("")  # nothing is read again
    assert done(pretrain(store, growing, name="growing")) == []


def test_garbage_is_what_no_run_refers_to(pretrain, store, capsys):
    pretrain(store, "train.sequence_length=16", replace=True)
    (store / "quarantine/tokens-1").mkdir(parents=True)
    (store / "quarantine/tokens-1/train.bin").write_bytes(b"x")

    def collect(*options: str) -> dict:
        capsys.readouterr()
        assert main(["gc", "--store", str(store), "--json", *options]) == 0
        return json.loads(capsys.readouterr().out)

    shown = collect()
    assert (shown["notes"], shown["removed"]) == ([], False)
    names = {each["name"] for each in shown["garbage"]}
    assert {"runs/micro~1", "quarantine/tokens-1"} <= names
    kinds = sorted(name.split("/")[1] for name in names if name.startswith("artifacts/"))
    assert kinds == ["dataset", "evaluation", "export", "training"]
    record = store / "runs/micro/artifacts.json"
    used = record.read_text()
    record.unlink()  # as before its first step has ended
    assert names - {each["name"] for each in collect()["garbage"]} == set()
    kept = {name.split("/")[1] for name in {each["name"] for each in collect()["garbage"]} - names}
    assert not kept & {"tokenizer", "dataset", "checkpoint", "graphs"}
    record.write_text(used)
    for kind in get_args(activities.Kind):
        with activities.begin(Store(str(store)), kind, "micro"):
            assert main(["gc", "--store", str(store), "--yes"]) == 2
            assert "run micro is active" in capsys.readouterr().err
    collect("--yes")
    assert collect()["garbage"] == []
    assert done(pretrain(store, "train.sequence_length=16")) == []


def test_renamed_run_reuses_the_data_and_has_the_same_losses(pretrain, store):
    result = pretrain(store, name="other")
    assert done(result) == ["train", "evaluate", "export"]
    assert losses(store / "runs/other") == losses(store / "runs/micro")


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


def test_tokenizer_that_does_not_fit_is_rejected_before_weights_and_data(pretrain, finished, tmp_path):
    (tokenizer,) = (finished[0] / "artifacts/tokenizer").iterdir()
    chat, store = tmp_path / "chat.jsonl", tmp_path / "store"
    chat.write_text(json.dumps({"messages": [{"role": r, "content": "a"} for r in ("user", "assistant")]}))
    given = (
        f"tokenizer.source={tokenizer}",
        "tokenizer.vocabulary_size=null",
        f"init.from={finished[1]['export']}",
    )
    sft = ("objective.kind=sft", f"data.sources=[{{kind: files, path: {chat}}}]", "data.deduplicate=false")
    for overrides, reason in (
        (["model.vocab_size=280"], r"model.vocab_size = 280: the tokenizer has 300 tokens"),
        (sft, r"objective\.template: is missing: the data has messages"),
    ):
        with pytest.raises(ProfileError, match=reason):
            pretrain(store, *given, *overrides)
    assert {path.name for path in (store / "artifacts").iterdir()} == {"tokenizer"}
