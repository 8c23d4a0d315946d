"""Training and evaluation started as a launcher does: resume, interruption, user functions, export."""

import gzip
import json
import os
import re
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from modeling.conversion.convert import Options, convert
from modeling.supervision import time_account
from modeling.training import train
from profiles.files import exit_codes
from tests.forkserver import forkserver
from tests.modeling import micro
from tests.modeling.training.test_user_functions import shadow_packages

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    return micro.dataset(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, dataset) -> Path:
    """A finished run."""
    run = micro.run_folder(tmp_path_factory.mktemp("run") / "undisturbed", "cluster.trace=[2,3]")
    micro.run("training.train", "--run-folder", run, "--dataset", dataset)
    return run


def test_training_learns_and_records_each_step_once(undisturbed):
    losses = micro.losses(undisturbed)
    assert list(losses) == list(range(1, 13))
    assert losses[12] < losses[1] - 0.5
    validation = [line for line in micro.metrics(undisturbed) if "validation_loss" in line]
    assert [line["step"] for line in validation] == [6, 12]
    assert sorted(p.name for p in (undisturbed / "checkpoints").glob("step_*")) == [
        "step_12",
        "step_4",
        "step_8",
    ]


def test_each_step_records_timings_and_resources(undisturbed):
    for row in (row for row in micro.metrics(undisturbed) if "loss" in row):
        parts = row["data_wait_seconds"] + row["forward_backward_seconds"] + row["optimizer_seconds"]
        assert 0 < parts <= row["step_seconds"]
        assert 0 <= row["communication_seconds"] < row["step_seconds"]
        assert row["memory_bytes"] > 50e6  # torch alone takes more
        assert 0 < row["host_cpu_cores"] < 2 * os.cpu_count()


def test_tensorboard_has_all_metrics_in_groups(undisturbed):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(undisturbed / "tensorboard"))
    board.Reload()
    tags = set(board.Tags()["scalars"])
    assert {
        "loss/loss",
        "loss/validation_loss",
        "time/forward_backward_seconds",
        "memory/memory_bytes",
    } <= tags
    assert [event.step for event in board.Scalars("loss/loss")] == list(range(1, 13))


def test_requested_steps_are_profiled(undisturbed):
    (path,) = (undisturbed / "traces").iterdir()
    assert path.name == "steps_2-3.json.gz"
    with gzip.open(path, "rt") as file:
        names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
    assert "aten::mm" in names or "aten::addmm" in names


def test_killed_run_resumes_with_bit_identical_losses(undisturbed, dataset, tmp_path):
    run = micro.run_folder(tmp_path / "killed")
    process = micro.start("training.train", "--run-folder", run, "--dataset", dataset)
    ranks: list[int] = []
    for line in process.stdout:
        ranks = ranks or (_ranks(process, run) if line.startswith("step ") else [])
        if line.startswith("step 7/"):
            os.kill(ranks[0], signal.SIGKILL)
            break
    micro.finish(process, code=None)
    assert not (run / "checkpoints" / "step_12").exists()
    log = micro.run("training.train", "--run-folder", run, "--dataset", dataset)
    # Step 8 may have been saved before the process ended.
    assert re.search("resumed from step [48]$", log, re.MULTILINE)
    assert micro.losses(run) == micro.losses(undisturbed)


def _ranks(process: subprocess.Popen, run: Path) -> list[int]:
    """PIDs of a run's training processes."""
    found = subprocess.run(
        ["pgrep", "-f", f"modeling.training.train.*{run}"], capture_output=True, text=True, check=True
    )
    return [pid for pid in map(int, found.stdout.split()) if pid != process.pid]


def test_sigterm_saves_and_resume_is_bit_identical(undisturbed, dataset, tmp_path):
    run = micro.run_folder(tmp_path / "stopped", "cluster.trace=[2,12]")
    process = micro.start("training.train", "--run-folder", run, "--dataset", dataset)
    for line in process.stdout:
        if line.startswith("step 5/"):
            break
    process.send_signal(signal.SIGTERM)
    micro.finish(process, code=None)
    done = max(micro.losses(run))
    assert 5 <= done < 12
    assert (run / "checkpoints" / f"step_{done}" / "complete.json").exists()
    log = micro.run("training.train", "--run-folder", run, "--dataset", dataset)
    assert f"resumed from step {done}" in log
    assert micro.losses(run) == micro.losses(undisturbed)
    # Each attempt traces its part of the range.
    traced = {path.name for path in (run / "traces").iterdir()}
    assert traced == {f"steps_2-{done}.json.gz", f"steps_{done + 1}-12.json.gz"}


def training_run(**attributes: object) -> train.TrainingRun:
    """A run without a model, with the attributes that a test needs."""
    run = object.__new__(train.TrainingRun)
    vars(run).update(
        {"_stopping": False, "_evaluation_due": False, "_drifted": None, "step": 0, **attributes}
    )
    return run


def test_time_of_completing_a_save_belongs_to_the_step_during_which_it_happened(monkeypatch):
    """The step that is queued when the previous one is finished, even if the save takes longer."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(time_account, "time", SimpleNamespace(monotonic=lambda: clock.now))
    account = time_account.TimeAccount()
    run = training_run(trainer=None, guard=MagicMock(), watchdog=MagicMock(), reporter=None, account=account)
    run.checkpoints = SimpleNamespace(written=lambda writers: writers == 0)
    run.checkpoints.complete = lambda: setattr(clock, "now", clock.now + 5.0)
    for step, seconds, writers in ((1, 1.0, 1), (2, 1.0, 0), (3, 6.0, 1), (4, 1.0, 0)):
        found = SimpleNamespace(
            loss=1.0,
            gradient_norm=1.0,
            skipped=False,
            stop_requests=0,
            differing=0,
            checkpoint_writers=writers,
        )
        timings = SimpleNamespace(total=seconds, compute=seconds)
        run._queued = SimpleNamespace(step=step, read=lambda trainer, result=(found, timings): result)
        run._finish_step(in_step=step < 4)
    assert account.totals == {
        "trained_seconds": 4.0,
        "skipped_seconds": 0.0,
        "compile_seconds": 0.0,
        "evaluation_seconds": 0.0,
        "checkpoint_seconds": 10.0,
    }


def test_stop_during_the_evaluation_of_initial_weights_ends_the_attempt(tmp_path, monkeypatch):
    def evaluate_into(output, trainer, samples, step, after_pass):
        for _ in range(2):
            after_pass()
            run.stop.requested = True
        raise AssertionError("not stopped")

    monkeypatch.setattr(train, "evaluate_into", evaluate_into)
    run = training_run(
        trainer=SimpleNamespace(leader=True, sum_on_host=lambda numbers: numbers.tolist()),
        initial_evaluation=tmp_path / "before.json",
        validation=None,
        settings=SimpleNamespace(steps=12, last_step=12),
        profile=SimpleNamespace(checkpoint=SimpleNamespace(on_stop=True)),
        **{name: MagicMock() for name in ("watchdog", "reporter")},
        stop=SimpleNamespace(requested=False),
    )
    assert run._train_steps() == exit_codes.INTERRUPTED
    assert run.watchdog.progress.call_count == 2
    run.reporter.event.assert_called_once_with("interrupted", 0, "not saved")


def test_resume_before_a_change_of_the_mixture_is_bit_identical(dataset, tmp_path):
    corpus = json.loads((dataset / "corpus.json").read_text())
    (whole,) = corpus["train"]
    half = whole["tokens"] // 2
    corpus["train"] = [{**whole, "start": start, "tokens": half} for start in (0, half)]
    corpus["blend"] = [{"weight": 1, "shards": 1}, {"weight": 1, "shards": 1}]
    two_sources = dataset.parent / "two-sources"
    two_sources.mkdir()
    (two_sources / "corpus.json").write_text(json.dumps(corpus))
    mixture = (
        "data.sources=[{kind: python-docs, weight: 1}, {kind: python-docs, weight: 1}]",
        "data.schedule=[{step: 6, weights: [0, 1]}]",
        "parallel.tensor=1",
        "cluster.devices_per_node=1",
        "evaluate.every=0",
    )
    runs = [micro.run_folder(tmp_path / name, *mixture) for name in ("whole", "resumed")]
    micro.run("training.train", "--run-folder", runs[0], "--dataset", two_sources, processes=1)
    (runs[1] / "checkpoints").mkdir()
    (runs[1] / "checkpoints/step_4").symlink_to(runs[0] / "checkpoints/step_4")
    log = micro.run("training.train", "--run-folder", runs[1], "--dataset", two_sources, processes=1)
    assert "resumed from step 4" in log
    found = [micro.losses(run) for run in runs]
    assert found[1] == {step: loss for step, loss in found[0].items() if step > 4}


def test_stale_attempt_completes_no_checkpoint(dataset, tmp_path):
    run = micro.run_folder(tmp_path / "superseded")
    (run / "attempt").write_text("3")
    arguments = ("training.train", "--run-folder", run, "--dataset", dataset, "--attempt")
    log = micro.run(*arguments, "2", code=1)
    assert "attempt 2 ends: attempt 3 has taken over the run" in log
    assert list((run / "checkpoints").glob("*/complete.json")) == []
    micro.run(*arguments, "3")
    assert (run / "checkpoints/step_12/complete.json").exists()


def test_run_resumes_on_another_topology(undisturbed, dataset, tmp_path):
    run = micro.run_folder(tmp_path / "moved", "train.steps=12")
    (run / "checkpoints").mkdir()
    source = undisturbed / "checkpoints" / "step_8"
    (run / "checkpoints" / "step_8").symlink_to(source)
    micro.run_folder(run, "parallel.tensor=1", "cluster.devices_per_node=2", "train.log_every=5")
    log = micro.run("training.train", "--run-folder", run, "--dataset", dataset)
    assert "resumed from step 8" in log
    assert re.findall("^step ([0-9]+)/12  loss", log, re.MULTILINE) == ["10", "12"]
    assert list(micro.losses(run)) == [9, 10, 11, 12]
    expected = micro.losses(undisturbed)
    for step, loss in micro.losses(run).items():
        assert loss == pytest.approx(expected[step], rel=1e-5)


def test_evaluation_and_export_agree_with_transformers(undisturbed, dataset, tmp_path):
    output = tmp_path / "held_out.json"
    micro.run("training.evaluate", "--run-folder", undisturbed, "--dataset", dataset, "--output", output)
    held_out = json.loads(output.read_text())
    convert(undisturbed, tmp_path / "export", Options("hf"))

    import torch
    from transformers import AutoModelForCausalLM

    from modeling.data.corpus import Corpus, Samples
    from modeling.training.generate import REPORTED

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    samples = Samples(Corpus.open(dataset, "validation"), 32, seed=None)
    rows = torch.from_numpy(samples.batch(0, samples.windows))
    with torch.no_grad():
        logits = model(rows[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).double(), rows[:, 1:].flatten())
    assert held_out["tokens"] == samples.windows * 32
    for sample in held_out["samples"]:  # each token is also likely according to the exported model
        whole = torch.tensor([sample["prompt"] + sample["text"]])
        given = len(sample["prompt"])
        with torch.no_grad():
            likeliest = model(whole).logits[0, given - 1 : -1].topk(REPORTED.top_k).indices
        assert all(token in row for token, row in zip(sample["text"], likeliest.tolist(), strict=True))
    assert len(held_out["samples"]) == 3
    assert held_out["validation_loss"] == pytest.approx(loss.item(), abs=1e-5)


OWN = """
import torch.nn.functional as F

def doubled(logits, targets):
    return 2 * F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")

def accuracy(logits, targets):
    return (logits.argmax(-1) == targets).sum().float()
"""


@pytest.fixture(scope="module")
def usual(tmp_path_factory, dataset) -> Path:
    """A finished run of the usual loss."""
    run = micro.run_folder(tmp_path_factory.mktemp("usual"), "train.steps=6")
    micro.run("training.train", "--run-folder", run, "--dataset", dataset)
    return run


@pytest.mark.parametrize("topology", [("parallel.tensor=2",), ("parallel.tensor=1", "parallel.pipeline=2")])
def test_user_loss_is_trained_and_user_metrics_are_recorded(usual, dataset, tmp_path, monkeypatch, topology):
    """Doubled cross-entropy and clipping norm train identically, so every loss shows whether it was used."""
    (tmp_path / "own.py").write_text(OWN)
    shadow_packages(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    functions = ("train.loss=own:doubled", "evaluate.metrics=[own:accuracy]")
    run = micro.run_folder(tmp_path / "run", *functions, *topology, "train.clip=2.0", "train.steps=6")
    micro.run("training.train", "--run-folder", run, "--dataset", dataset)
    expected = micro.losses(usual)
    for step, loss in micro.losses(run).items():
        assert loss == pytest.approx(2 * expected[step], rel=1e-4)
    (evaluated,) = (line for line in micro.metrics(run) if "validation_loss" in line)
    (other,) = (line for line in micro.metrics(usual) if "validation_loss" in line)
    assert evaluated["validation_loss"] == pytest.approx(2 * other["validation_loss"], rel=1e-4)
    assert 0 < evaluated["accuracy"] < 1
    held_out = tmp_path / "held_out.json"
    micro.run("training.evaluate", "--run-folder", run, "--dataset", dataset, "--output", held_out)
    result = json.loads(held_out.read_text())
    # The final evaluation uses the complete split.
    assert result["validation_loss"] == pytest.approx(evaluated["validation_loss"], rel=0.05)
    assert len(result["samples"]) == 3


def test_training_imports_neither_prefect_nor_transformers():
    """Nor does anything else that the server of forked ranks has imported."""
    module = "modeling.training.train"
    code = "import sys; sys.exit({%r, 'prefect', 'transformers', 'datasets'} & {*sys.modules} != {%r})"
    process = forkserver().Process(target=exec, args=(code % (module, module),))
    process.start()
    process.join()
    assert process.exitcode == 0
