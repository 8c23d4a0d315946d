"""Evaluation of a run, with real processes: what its failures mean, and whose job it is."""

import json
import multiprocessing
import time

import pytest

from profiles import resolve
from tasks.evaluation import held_out as evaluation
from tasks.evaluation.held_out import EvaluationStep
from tasks.failures import FatalError
from tasks.launchers import create, latest_jobs
from tasks.step import Context
from tasks.steps.dataset import DatasetStep
from tasks.steps.tokenizer import TokenizerStep
from tasks.steps.training import TrainingStep
from tasks.store.store import Store
from tests.flows.micro import write_profile


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A profile, a store with its tokens in it, and these."""
    folder = tmp_path_factory.mktemp("lab")
    profile = resolve.load(str(write_profile(folder)), ["evaluate.every=0"])
    store = Store(str(folder / "store"))
    return (
        profile,
        store,
        DatasetStep(TokenizerStep().run(Context(profile, store))).run(Context(profile, store)),
    )


def run_folder(profile, store, name):
    folder = store.run_folder(name).prepare("identity")
    (folder / "profile.yaml").write_text(resolve.dump(profile))
    return folder


def test_run_without_a_checkpoint_is_rejected_and_not_retried(lab):
    profile, store, tokens = lab
    with pytest.raises(FatalError, match=r"^run empty has no complete checkpoint to evaluate"):
        EvaluationStep(tokens, "identity").run(Context(profile, store, run_folder(profile, store, "empty")))


def evaluate(profile, store, folder, identity, tokens):
    return EvaluationStep(tokens, identity).run(Context(profile, Store(store), folder))


def abandoned(profile, store, folder, identity, tokens):
    """An evaluation whose orchestrator is killed as soon as the job runs."""
    note = folder / "logs/evaluate.job.json"
    note.unlink(missing_ok=True)
    arguments = (profile, store.uri, folder, identity, tokens)
    orchestrator = multiprocessing.get_context("spawn").Process(target=evaluate, args=arguments)
    orchestrator.start()
    while not note.exists():
        assert orchestrator.is_alive()
        time.sleep(0.02)
    orchestrator.kill()
    orchestrator.join()
    (handle,) = (each for each in latest_jobs(folder / "logs") if each.job.name == "evaluate")
    return handle


def test_whoever_comes_later_joins_the_evaluation_or_takes_what_it_left(lab, caplog):
    profile, store, tokens = lab
    folder = run_folder(profile, store, "trained")
    TrainingStep(tokens, "identity").run(Context(profile, store, folder))
    log = folder / "logs/evaluate.log"

    abandoned(profile, store, folder, "one", tokens)
    joined = evaluate(profile, store.uri, folder, "one", tokens)
    assert "evaluate is already running: re-attached to it" in caplog.text
    assert log.read_text().count("validation loss") == 1
    assert joined.summary["step"] == profile.train.steps

    handle, launcher = abandoned(profile, store, folder, "two", tokens), create("local")
    while launcher.poll(handle).running:
        time.sleep(0.1)
    taken = evaluate(profile, store.uri, folder, "two", tokens)
    assert log.read_text().count("validation loss") == 2
    assert taken.summary == joined.summary
    assert (
        json.loads((store.artifacts.path(taken) / evaluation.FILE).read_text())["step"] == profile.train.steps
    )
    assert not list((folder / "logs").glob("evaluation-*.json"))
