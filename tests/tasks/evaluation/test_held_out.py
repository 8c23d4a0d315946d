"""Evaluation of a run in real processes: rejected runs, and flows killed while the job runs."""

import json
import time
from threading import Thread

import pytest

from profiles import resolve
from tasks.evaluation import held_out as evaluation
from tasks.evaluation.held_out import EvaluationStep
from tasks.failures import FatalError
from tasks.launchers import latest_jobs, local
from tasks.step import Context
from tasks.steps.training import TrainingStep
from tasks.store.store import Store
from tests.forkserver import forkserver

pytestmark = pytest.mark.slow


def run_folder(profile, store, name, identity="identity"):
    folder = store.run_folder(name).prepare(identity)
    (folder / "profile.yaml").write_text(resolve.dump(profile))
    return folder


def test_run_without_a_checkpoint_is_rejected_and_not_retried(tokenized):
    profile, store, dataset = tokenized
    with pytest.raises(FatalError, match=r"^run empty has no complete checkpoint to evaluate"):
        EvaluationStep(dataset, "identity").run(Context(profile, store, run_folder(profile, store, "empty")))


def evaluate(profile, store, folder, identity, dataset):
    return EvaluationStep(dataset, identity).run(Context(profile, Store(store), folder))


def abandon(profile, store, folder, identity, dataset):
    """Start an evaluation in a process that is killed once the job runs; returns the job's handle."""
    handle_file = folder / "logs/evaluate.job.json"
    handle_file.unlink(missing_ok=True)
    arguments = (profile, store.uri, folder, identity, dataset)
    flow = forkserver().Process(target=evaluate, args=arguments)
    flow.start()
    while not (handles := _evaluations(folder)) or not local._processes(handles[0].identifier):
        assert flow.is_alive()
        time.sleep(0.02)
    flow.kill()
    flow.join()
    return handles[0]


def _evaluations(folder):
    return [handle for handle in latest_jobs(folder / "logs") if handle.job.name == "evaluate"]


def resume_once_found(processes, caplog):
    """Continue suspended processes of a job once a flow has re-attached to it, or after a minute."""
    deadline = time.monotonic() + 60
    while "re-attached" not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in processes:
        process.resume()


def test_restarted_flow_re_attaches_to_the_evaluation_or_uses_the_result_that_it_left(tokenized, caplog):
    profile, store, dataset = tokenized
    folder = run_folder(profile, store, "trained")
    TrainingStep(dataset, "identity").run(Context(profile, store, folder))
    log = folder / "logs/evaluate.log"

    paused = local._processes(abandon(profile, store, folder, "one", dataset).identifier)
    for process in paused:  # the job cannot end before it is found again
        process.suspend()
    resume = Thread(target=resume_once_found, args=(paused, caplog))
    resume.start()
    followed = evaluate(profile, store.uri, folder, "one", dataset)
    resume.join()
    assert "evaluate is already running: re-attached to it" in caplog.text
    assert log.read_text().count("validation loss") == 1
    assert followed.summary["step"] == profile.train.steps

    handle, launcher = abandon(profile, store, folder, "two", dataset), local.LocalLauncher()
    while launcher.poll(handle).running:
        time.sleep(0.1)
    found = evaluate(profile, store.uri, folder, "two", dataset)
    assert log.read_text().count("validation loss") == 2
    assert found.summary == followed.summary
    contents = json.loads((store.artifacts.path(found) / evaluation.FILE).read_text())
    assert contents["step"] == profile.train.steps
    assert not list((folder / "logs").glob("evaluation-*.json"))
