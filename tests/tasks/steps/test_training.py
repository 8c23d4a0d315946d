"""Training step: a stopped job's grace period, log forwarding, missing evaluations, moved run folders."""

import json
import logging
import time

import fsspec
import pytest

from benchmarks.harness.processes import training_ranks
from profiles import resolve
from profiles.files import exit_codes, state_files
from tasks.failures import FatalError
from tasks.launchers import JobFailed
from tasks.step import Context
from tasks.steps import training
from tasks.steps.training import LogForwarder, TrainingStep
from tasks.store import runs
from tasks.store.artifacts import Artifact, ArtifactId
from tasks.store.store import Store
from tests.tasks.evaluation.test_held_out import run_folder

pytestmark = pytest.mark.slow
TRACEBACK = "Traceback (most recent call last):"


def test_stopped_job_has_the_grace_period_to_save(tokenized):
    """The ranks are suspended, so they never save."""
    profile, store, dataset = tokenized
    changed = {"train": {"steps": 100_000}, "checkpoint": {"every": 0}, "cluster": {"grace": 4}}
    parts = {key: getattr(profile, key).model_copy(update=values) for key, values in changed.items()}
    profile = profile.model_copy(update=parts)
    folder, stopped = run_folder(profile, store, "grace"), []

    def stop():
        if runs.last_training_row(folder):
            for process in training_ranks(folder):
                process.suspend()
            stopped.append(time.monotonic())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        TrainingStep(dataset, "identity").run(Context(profile, store, folder, watch=stop))
    assert 4 <= time.monotonic() - stopped[0] < 25


def test_rank_0_log_is_forwarded_without_steps_and_throttled(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    path = tmp_path / "train.log"
    path.write_text("[rank 0] of an earlier attempt\n")
    forwarder = LogForwarder(path)
    with path.open("a") as file:
        file.write(
            "[rank 0] resumed from step 40\n[rank 1] resumed too\n[rank 0] step 41/100  loss 5\nnot a rank's\n"
        )
        nameless = "[c10d] The hostname of the client socket cannot be retrieved. err=-3"
        file.write(f"[rank 0] [W1129 12:15:49.432635886 socket.cpp:207] {nameless}\n")
        thread = ("Exception in thread writer:", TRACEBACK, '  File "writer.py"', "OSError: disk full")
        file.writelines(f"[rank 0] {line}\n" for line in thread)  # does not end the job
        file.write("[rank 0] failed\n[rank 0] retried\n")  # a user's function prints that
        failure = (
            *("failed", TRACEBACK, '  File "loss.py"', "AcceleratorError: CUDA error", "Compile with"),
            *("", "The above exception was the direct cause of the following exception:", "", TRACEBACK),
            *('  File "train.py"', "ValueError: no loss"),
        )
        file.writelines(f"[rank 0] {line}\n" for line in failure)  # the job's error has it
        file.write("job 7, start 2, on node-1; rendezvous at 10.0.0.1:20000\n")  # Slurm has requeued the job
        file.writelines(f"[rank 0] chatter {number}\n" for number in range(1000))
        file.write("[rank 0] UserWarning: look at this\n[rank 0] half a li")
    forwarder.forward()
    messages = [record.getMessage() for record in caplog.records]
    assert messages[:8] == ["resumed from step 40", *thread, "failed", "retried", "chatter 0"]
    assert messages[-1] == "UserWarning: look at this"
    assert caplog.records[-1].levelno == logging.WARNING
    assert len(messages) < 20
    assert not any("step 41" in line or "earlier" in line or "half" in line for line in messages)


def test_moved_run_folder_is_fatal_and_not_recreated(tokenized):
    profile, store, dataset = tokenized
    folder = run_folder(profile, store, "gone")
    folder.rename(folder.with_name("moved"))
    with pytest.raises(
        FatalError, match=rf"{folder}: moved or removed while the run was active; move it back"
    ):
        TrainingStep(dataset, "identity").run(Context(profile, store, folder))
    assert not folder.exists()


@pytest.mark.parametrize("remote", [False, True])
def test_run_that_replaced_this_one_is_not_trained(tmp_path, remote):
    """Another host has replaced the run while this flow was suspended."""
    fsspec.filesystem("memory").store.clear()
    uri, profile = "memory://bucket/store" if remote else str(tmp_path / "store"), resolve.load("tiny")
    here, there = Store(uri, tmp_path / "here"), Store(uri, tmp_path / "there")
    folder = run_folder(profile, here, "run")
    there.run_folder("run").move_aside()
    replacement = run_folder(profile, there, "run", "another")
    with pytest.raises(FatalError, match=rf"{uri}/runs/run: now belongs to another run"):
        TrainingStep(Artifact(ArtifactId("dataset", "key")), "identity").run(Context(profile, here, folder))
    assert sorted(path.name for path in replacement.iterdir()) == ["profile.yaml", "run.json"]


def test_last_checkpoint_of_another_run_is_no_result(tmp_path):
    profile, store = resolve.load("tiny"), Store(str(tmp_path))
    folder = run_folder(profile, store, "run")
    marker = folder / f"checkpoints/step_{profile.train.steps}/complete.json"
    state_files.write(
        marker, json.dumps({"run": {"identity": "identity", "id": "of the run that was replaced"}})
    )
    with pytest.raises(FatalError, match=rf"{marker.parent}: written by another run; move the folder away"):
        TrainingStep(Artifact(ArtifactId("dataset", "key")), "identity").run(Context(profile, store, folder))


@pytest.mark.parametrize(
    ("every", "due", "evaluated", "jobs"),
    [
        (3, True, None, 2),
        (3, True, 6, 0),  # made up by an attempt that no flow followed
        (3, None, None, 0),  # saved by an earlier version
        (0, True, None, 0),  # evaluations were turned off since
    ],
)
def test_step_is_complete_once_the_evaluation_that_a_stop_prevented_is_made_up(
    tmp_path, monkeypatch, every, due, evaluated, jobs
):
    """The first job that is started is stopped again, the second evaluates."""
    profile = resolve.load("tiny", ["train.steps=6", "train.warmup_steps=2", f"evaluate.every={every}"])
    store, started = Store(str(tmp_path / "store")), []
    folder = run_folder(profile, store, "run")
    checkpoint = folder / "checkpoints/step_6"
    checkpoint.mkdir(parents=True)
    (checkpoint / "complete.json").write_text(json.dumps({"loss": 2.0, "evaluation_due": due}))
    state_files.append_line(folder / "metrics.jsonl", json.dumps({"step": evaluated, "validation_loss": 3.0}))

    def execute(launcher, job, *arguments, **options):
        started.append(job.name)
        if len(started) == 1:
            raise JobFailed("stopped", exit_code=exit_codes.INTERRUPTED)
        state_files.append_line(folder / "metrics.jsonl", json.dumps({"step": 6, "validation_loss": 3.0}))

    monkeypatch.setattr(training, "execute", execute)
    with store.artifacts.publish(ArtifactId("dataset", "key"), {}):
        pass
    step = TrainingStep(store.artifacts.expect(ArtifactId("dataset", "key")), "identity")
    context = Context(profile, store, folder)
    if jobs:
        with pytest.raises(JobFailed, match="stopped"):
            step.run(context)
    for _ in range(2):  # the second time, from the store
        assert step.run(context).summary["loss"] == 2.0
    assert len(started) == jobs
