"""Evaluation of checkpoints: held-out loss, losses by data source, a task of lm-evaluation-harness."""

import importlib.util
import json
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from contextvars import copy_context
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest
import yaml

from flows.alerts import events
from flows.cli.main import main
from parallel.checkpoint.locations import MARKER
from profiles.errors import ProfileError
from profiles.files import state_files
from profiles.resolve import load
from tasks.failures import FatalError
from tasks.store import runs
from tasks.store.store import Store
from tests.flows.micro import shown
from tests.forked_jobs import forked_jobs
from tests.tasks.reporting.run_folders import write_report, write_run
from tests.waiting import until

SHIPPED = "tasks/sciq"  # folder of one task
GATED_TASK = "letters"  # of the user's folder, for a gate
TASK = {
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{answer}}",
    "doc_to_choice": "{{choices}}",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    "metadata": {"version": 1.0},
}


def write_task(folder: Path, name: str) -> None:
    """Write a task and its data into a folder."""
    rows = [{"question": f"word {n}", "choices": [" a", " b"], "answer": n % 2} for n in range(4)]
    (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data = {"data_files": {"test": str(folder / f"{name}.jsonl")}}
    (folder / f"{name}.yaml").write_text(yaml.safe_dump({**TASK, "task": name, "dataset_kwargs": data}))


@pytest.fixture(scope="module", autouse=True)
def _few_shipped_tasks(tmp_path_factory):
    """The installed lm-eval with one task of its own: listing all 13,000 takes each job 20 s of CPU."""
    installed = Path(importlib.util.find_spec("lm_eval").origin).parent
    place = tmp_path_factory.mktemp("lm-eval")
    (place / "lm_eval/tasks").mkdir(parents=True)
    for kept in (
        *installed.iterdir(),
        *installed.glob("tasks/_*"),
        *installed.glob("tasks/*.py"),
        installed / SHIPPED,
    ):
        copy = place / "lm_eval" / kept.relative_to(installed)
        if not copy.exists():
            copy.symlink_to(kept)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(place), prepend=os.pathsep)
        yield


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder with tasks and their data."""
    folder = tmp_path_factory.mktemp("tasks")
    write_task(folder, "endings")
    write_task(folder, GATED_TASK)
    hub = {"task": "remote", "dataset_path": "nobody/has-this"}
    (folder / "remote.yaml").write_text(yaml.safe_dump({**TASK, **hub}))
    return folder


@pytest.fixture(scope="module")
def trained(pretrain, profile, tmp_path_factory):
    """The store of a finished run with checkpoints of steps 2, 4 and 6, and two data sources."""
    store = tmp_path_factory.mktemp("evaluated") / "store"
    texts = yaml.safe_load(profile.read_text())["data"]["sources"][0]["path"]
    other = store.parent / "others.jsonl"
    lines = Path(texts).read_text().splitlines()
    other.write_text("\n".join(line.replace('": "', '": "other ') for line in lines))
    sources = [{"kind": "files", "path": str(path)} for path in (texts, other)]
    overrides = [f"data.sources={json.dumps(sources)}", "checkpoint.every=2", "checkpoint.keep=0"]
    overrides += ["evaluate.every=3", "evaluate.batches=null", "evaluate.by_source=true"]
    result = pretrain(store, *overrides, name="run")
    return store, result


def evaluate(store, run, **options):
    from flows.evaluate import evaluate

    with forked_jobs():
        return evaluate(run, store=str(store), **options)


def test_losses_of_data_sources_are_in_the_metrics_and_the_report(trained):
    store, _ = trained
    rows = [json.loads(line) for line in (store / "runs/run/metrics.jsonl").read_text().splitlines()]
    evaluated = [row for row in rows if "validation_loss" in row]
    assert [row["step"] for row in evaluated] == [3, 6]
    for row in evaluated:
        parts = [row["validation_loss/texts"], row["validation_loss/others"]]
        assert min(parts) <= row["validation_loss"] <= max(parts)
    report = json.loads((store / "runs/run/report.json").read_text())
    assert {"validation_loss/texts", "validation_loss/others"} <= report["evaluation"]["metrics"].keys()
    assert "Validation loss by data source" in (store / "runs/run/report.html").read_text()


def test_checkpoints_are_evaluated_once_and_results_reach_the_report(trained, tasks, capsys):
    store, result = trained
    first = evaluate(
        store, "run@4", tasks=["endings"], include=str(tasks), overrides=["evaluate.by_source=false"]
    )
    assert [row["step"] for row in first] == [4]
    assert 0 <= first[0]["lm_eval/endings/acc"] <= 1
    rows = evaluate(store, "run", follow=True)  # the run has ended, so it does not wait
    assert [row["step"] for row in rows] == [2, 4, 6]
    assert rows[-1]["validation_loss"] == pytest.approx(result["validation_loss"], rel=1e-6)
    assert (
        rows[1]["lm_eval/endings/acc"] == first[0]["lm_eval/endings/acc"]
    )  # a later result with fewer metrics keeps it
    logs = [*(store / "runs/run/logs").glob("evaluat*.log")]
    sizes = {path: path.stat().st_size for path in logs}
    capsys.readouterr()  # what a command of another test set up may have printed
    with forked_jobs():
        assert main(["evaluate", "run", "--json", "--store", str(store)]) == 0
    assert json.loads(capsys.readouterr().out) == rows
    assert {path: path.stat().st_size for path in logs} == sizes  # no job ran
    assert not [*(store / "work").glob("evaluate-*")]
    report = (store / "runs/run/report.html").read_text()
    assert "Evaluations of checkpoints" in report
    assert "lm_eval/<wbr>endings/<wbr>acc" in report
    table = json.loads(shown("run")["evaluations"])
    assert [row["validation_loss"] for row in table] == [f"{row['validation_loss']:.4f}" for row in rows]


def test_round_is_promoted_by_its_score_on_a_task_of_a_folder(trained, profile, tasks, tmp_path, monkeypatch):
    """It first misses its gate, then meets another one, for which no task is evaluated again."""
    from flows.continual import continual

    store, new = shutil.copytree(trained[0], tmp_path / "store"), tmp_path / "new.jsonl"
    sources = [{"path": source.path} for source in load(str(store / "runs/run/profile.yaml")).data.sources]
    lines = Path(sources[0]["path"]).read_text().splitlines()[:90]
    new.write_text("\n".join(line.replace('": "', '": "new ') for line in lines))
    sources = [{"kind": "files", **source} for source in (*sources, {"path": str(new)})]
    overrides = [f"data.sources={json.dumps(sources)}", "train.steps=2", "train.warmup_steps=1"]
    overrides.append(f"continual.include={tasks}")
    alerts = []
    monkeypatch.setattr("flows.continual.emit", lambda *facts: alerts.append(facts))

    def judged(gate: str):
        """Final state of a round, and the line of its table that the gate is on."""
        gated = f"continual.gates=[{{on: task:{GATED_TASK}, {gate}}}]"
        with forked_jobs():
            state = continual(str(profile), [*overrides, gated], "run", str(store), return_state=True)
        headings, line, *_ = state.message.partition("\n\n")[2].splitlines()
        assert headings.split() == ["set", "before", "after", "limit", "met"]
        return state, line.split()

    def scores() -> list[str]:
        files = store.glob("artifacts/task-evaluation/*/result.json")
        results = [json.loads(file.read_text())["results"] for file in files]
        return sorted(f"{each[GATED_TASK]['acc']:.4f}" for each in results if GATED_TASK in each)

    state, line = judged("at_least: 2")
    assert state.name == "NotPromoted", state.message
    assert state.message.startswith(f"run remains promoted: task:{GATED_TASK} ")
    assert "(required: at least 2)" in state.message
    assert (line[0], line[-1]) == (f"task:{GATED_TASK}", "no")
    measured = line[1:3]  # of the promoted model and of the round
    assert scores() == sorted(measured)
    assert not (store / "runs/run-round-1/export").exists()

    # Its name was checked above, which takes seconds.
    monkeypatch.setattr("flows.verdicts.require_tasks", lambda *_: None)
    state, line = judged("at_least: 0")
    assert state.name == "Promoted", state.message
    assert (line[1:3], line[-1]) == (measured, "yes")
    assert scores() == sorted(measured)
    assert json.loads((store / "runs/run/standing.json").read_text())["run"] == "run-round-1"
    assert [alert[:2] for alert in alerts] == [("not-promoted", "run-round-1"), ("promoted", "run-round-1")]
    assert alerts[1][2] == state.message
    gates = json.loads(shown("run")["gates"])
    assert [gates[0][name] for name in ("set", "before", "met")] == [line[0], line[1], line[-1]]
    assert f"task:{GATED_TASK}" in (store / "runs/run-round-1/report.html").read_text()


GATED = """
import time
from pathlib import Path
import torch.nn.functional as F
steps = 0
def loss(logits, targets):
    global steps
    steps += logits.requires_grad
    while steps > 4 and logits.requires_grad and not Path("go").exists():
        time.sleep(0.05)
    return F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
"""


def test_a_followed_run_has_each_checkpoint_evaluated_once(pretrain, tmp_path, monkeypatch):
    """Training waits in step 5 until the checkpoint of step 2 is evaluated."""
    store, folder = tmp_path / "store", tmp_path / "store/runs/live"
    (tmp_path / "gated.py").write_text(GATED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("flows.evaluate.POLL_SECONDS", 0.1)
    overrides = ("train.steps=8", "checkpoint.keep=0", "evaluate.every=0", "train.loss=gated:loss")

    def let_it_end():
        try:
            until((folder / "evaluations.jsonl").exists, 300)
        finally:
            (tmp_path / "go").touch()

    with forked_jobs(), ThreadPoolExecutor() as pool:
        run = pool.submit(copy_context().run, pretrain, store, *overrides, name="live")
        gate = pool.submit(let_it_end)
        until(lambda: run.done() or (folder / "checkpoints/step_2/complete.json").exists(), 300)
        rows = evaluate(store, "live", follow=True)
        result, _ = run.result(), gate.result()
    assert [row["step"] for row in rows] == [2, 4, 6, 8]
    assert rows[-1]["validation_loss"] == pytest.approx(result["validation_loss"], rel=1e-6)
    log = (folder / "logs/evaluate-checkpoint.log").read_text()
    assert re.findall(r"step (\d+): validation loss", log) == ["2", "4", "6", "8"]
    assert (folder / "evaluations.jsonl").read_text().count("\n") == 4
    assert (
        "Evaluations of checkpoints" in (folder / "report.html").read_text()
    )  # also if it was written before


def test_a_followed_run_has_a_step_evaluated_again_after_a_rollback(tmp_path, monkeypatch):
    """Evaluations are made up: the loss is in the checkpoint's marker."""
    import flows.evaluate as evaluation
    from modeling.training.metrics import record_event

    store = Store(str(tmp_path))
    inputs = {"tokenizer": "t", "dataset": "d", "checkpoint": None}
    folder = runs.open_run(store, load("tiny", (), "run"), "identity", "flow", inputs)
    markers = [folder / f"checkpoints/step_{step}/complete.json" for step in (90, 100)]
    emitted = []
    monkeypatch.setattr(events, "emit", lambda kind, run, message, **facts: emitted.append((kind, facts)))
    alerts = events.RunAlerts(load("tiny"), store.run_folder("run"))
    alerts.begin()

    def save(marker, loss):
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.write_text(json.dumps({"loss": loss}))
        alerts.update(now=True)

    def train():
        yield True
        save(markers[1], 2.5)  # first rolled back, unnoticed by the evaluation
        record_event(folder, "rollback", step=100, reason="spike", back_to=90)
        alerts.update(now=True)
        yield False

    def found(evaluator, checkpoint):
        marker = folder / f"checkpoints/step_{checkpoint.step}/complete.json"
        return {"validation_loss": json.loads(marker.read_text())["loss"]}

    training = train()
    for marker, loss in zip(markers, (3.0, 9.0), strict=True):
        save(marker, loss)
    monkeypatch.setattr(evaluation, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(evaluation, "_show", lambda *_: None)
    monkeypatch.setattr(evaluation.Evaluator, "_evaluate", found)
    monkeypatch.setattr(evaluation.activities, "holder", lambda *_: next(training, None) or None)
    rows = evaluation.evaluate.fn.__wrapped__("run", follow=True, store=str(tmp_path))
    assert [(row["step"], row["validation_loss"]) for row in rows] == [(90, 3.0), (100, 2.5)]
    completed = [(facts["step"], facts["store"]) for kind, facts in emitted if kind == "checkpoint"]
    assert completed == [(90, str(tmp_path)), (100, str(tmp_path)), (100, str(tmp_path))]


def test_loss_under_settings_that_change_it_is_cached_separately_and_not_recorded(tmp_path, monkeypatch):
    """Evaluations are made up: the loss is the number of evaluations with other keys before it."""
    import flows.evaluate as evaluation

    store, found = Store(str(tmp_path)), []
    inputs = {"tokenizer": "t", "dataset": "d", "checkpoint": None}
    folder = runs.open_run(store, load("tiny", (), "run"), "identity", "flow", inputs)
    store.run_folder("run").write(f"checkpoints/step_4/{MARKER}", b"{}")

    def run(runner, step):
        if (key := step.key(runner.context)) not in found:
            found.append(key)
        return SimpleNamespace(summary={"validation_loss": float(found.index(key)), "metrics": {}})

    def losses(*overrides):
        rows = evaluation.evaluate.fn.__wrapped__("run@4", overrides=overrides, store=str(tmp_path))
        return [row["validation_loss"] for row in rows]

    monkeypatch.setattr(evaluation.Runner, "run", run)
    monkeypatch.setattr(evaluation.Evaluator, "_artifact", lambda evaluator, kind: None)
    monkeypatch.setattr(evaluation, "_show", lambda *_: None)
    assert losses() == [0]
    assert losses("train.precision=bf16") == [1]
    assert losses("cluster.threads=3", "data.cache_gigabytes=1") == [0]
    (row,) = (folder / "evaluations.jsonl").read_text().splitlines()
    assert json.loads(row)["validation_loss"] == 0


@pytest.mark.parametrize("override", ["data.sources=[{kind: files, path: new.txt}]", "tokenizer.source=byte"])
def test_overrides_of_the_run_s_data_and_tokenizer_are_rejected(tmp_path, monkeypatch, capsys, override):
    """As all that can be without Prefect, by the command before it starts a server."""
    import flows.evaluate as evaluation

    store, key = Store(str(tmp_path)), override.partition("=")[0]
    runs.open_run(store, load("tiny", (), "run"), "identity", "flow", {"tokenizer": "t", "dataset": "d"})
    store.run_folder("run").write(f"checkpoints/step_4/{MARKER}", b"{}")
    with pytest.raises(ProfileError, match=f"^{key}: cannot be changed for an evaluation"):
        evaluation.evaluate.fn.__wrapped__("run", overrides=[override], store=str(tmp_path))
    monkeypatch.setattr("flows.cli.run.prefect_api", lambda _: pytest.fail("Prefect was started"))
    for arguments, says in (
        (["run", "--set", override], f"trainshed: {key}: cannot be changed for an evaluation"),
        (["run@x"], "trainshed: run = run@x: is neither RUN nor RUN@STEP"),
        (["run@3"], "trainshed: run = run@3: has no complete checkpoint of step 3; nearest valid: run@4"),
        (["run", "--include", "nowhere"], "trainshed: include = nowhere: is not a folder"),
    ):
        assert main(["evaluate", *arguments, "--store", str(tmp_path)]) == 2
        assert capsys.readouterr().err.startswith(says)


def test_results_reach_the_report_and_tensorboard_in_a_remote_store(tmp_path, monkeypatch):
    """Another machine has written the report since this one downloaded the run; the result is made up."""
    import flows.evaluate as evaluation

    fsspec.filesystem("memory").store.clear()
    uri = "memory://bucket/store"
    here, there = (Store(uri, tmp_path / machine) for machine in ("here", "there"))
    runs.open_run(there, load("tiny", (), "run"), "identity", "flow", {})
    run = there.run_folder("run")
    run.write(f"checkpoints/step_4/{MARKER}", b"{}")
    run.write("report.json", b"{}")  # of an earlier version
    runs.fetch(here, "run")
    write_run(tmp_path / "run")
    write_report(tmp_path / "run")
    for file in filter(Path.is_file, (tmp_path / "run").iterdir()):
        run.write(file.name, file.read_bytes())
    monkeypatch.setattr(evaluation.Evaluator, "_evaluate", lambda *_: {"validation_loss": 2.5})
    monkeypatch.setattr(evaluation, "show_table", lambda *_: None)
    evaluation.evaluate.fn.__wrapped__("run", store=uri, work_dir=str(tmp_path / "here"))
    report = json.loads(run.read("report.json"))
    assert report["evaluation"]["validation_loss"] == 7.4
    assert report["evaluations"] == [{"step": 4, "validation_loss": 2.5}]
    assert b"Evaluations of checkpoints" in run.read("report.html")
    assert len(run.files("tensorboard/evaluations")) == 1


def test_command_uses_its_work_dir_instead_of_the_run_s(tmp_path, monkeypatch, capsys):
    """The flow is made up."""
    import flows.evaluate as evaluation

    monkeypatch.chdir(tmp_path)
    fsspec.filesystem("memory").store.clear()
    uri, used = "memory://bucket/store", []
    inputs = {"tokenizer": "t", "dataset": "d", "checkpoint": None}
    run = load("tiny", ("cluster.work_dir=fast",), "run")
    elsewhere = Store(uri, tmp_path / "elsewhere")
    runs.open_run(elsewhere, run, "identity", "flow", inputs)
    elsewhere.run_folder("run").write(f"checkpoints/step_4/{MARKER}", b"{}")
    monkeypatch.setattr("flows.cli.run.prefect_api", lambda folder: used.append(folder) or nullcontext())
    monkeypatch.setattr(evaluation, "evaluate", lambda *_, **__: [])
    assert main(["evaluate", "run", "--store", uri, "--work-dir", "work", "--json"]) == 0
    assert [folder.resolve() for folder in used] == [tmp_path / "work"]
    assert {path.name for path in tmp_path.iterdir()} == {"elsewhere", "work"}


def test_evaluation_is_rejected_if_its_checkpoint_is_removed_while_it_waits(tmp_path, monkeypatch):
    import flows.evaluate as evaluation

    def begin(store, kind, name):
        store.run_folder(name).write(f"checkpoints/step_8/{MARKER}", b"{}")
        store.remove(f"runs/{name}/checkpoints/step_4")
        return real(store, kind, name)

    store, real = Store(str(tmp_path)), evaluation.activities.begin
    runs.open_run(store, load("tiny", (), "run"), "identity", "flow", {})
    store.run_folder("run").write(f"checkpoints/step_4/{MARKER}", b"{}")
    monkeypatch.setattr(evaluation.activities, "begin", begin)
    with pytest.raises(ProfileError, match="no complete checkpoint of step 4; nearest valid: run@8"):
        evaluation.evaluate.fn.__wrapped__("run@4", store=str(tmp_path))


def test_invalid_evaluations_are_rejected(trained, tasks, monkeypatch):
    store, _ = trained
    for run, message in (
        ("run@3", "run@2"),
        ("run@x", "neither RUN nor RUN@STEP"),
        ("rum", "no such run in .*; `trainshed runs --store .*` lists them; nearest valid: run"),
    ):
        with pytest.raises(ProfileError, match=message):
            evaluate(store, run)
    with pytest.raises(ProfileError, match="not a folder"):
        evaluate(store, "run", tasks=["endings"], include=str(tasks / "missing"))
    recorded = state_files.read_text(store / "runs/run/evaluations.jsonl")
    with pytest.raises(
        ProfileError, match=r"task = ending: lm-eval \S+ has no such task; nearest valid: endings"
    ):
        evaluate(store, "run@6", tasks=["endings", "ending"], include=str(tasks))
    assert state_files.read_text(store / "runs/run/evaluations.jsonl") == recorded
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(
        FatalError, match=r"the data of remote cannot be read .*nobody/has-this.*; without a network"
    ):
        evaluate(store, "run@6", tasks=["remote"], include=str(tasks))


def test_corrupted_checkpoint_is_one_clear_message_without_a_traceback(trained, capsys):
    """Last test of this file, because it corrupts a checkpoint of the run."""
    store, _ = trained
    data = next((store / "runs/run/checkpoints/step_2").glob("*.distcp"))
    data.write_bytes(b"\0" * data.stat().st_size)
    capsys.readouterr()
    with forked_jobs():
        code = main(["evaluate", "run@2", "--set", "evaluate.by_source=false", "--store", str(store)])
    out, err = capsys.readouterr()
    assert code == 1
    assert "Traceback" not in out + err
    assert "[rank 0]" not in out + err
    (message,) = [line for line in err.splitlines() if line.startswith("trainshed: ")]
    assert f"{data}: corrupted: " in message
    assert "restore it from a backup, or evaluate another: run@4, run@6 (" in message
