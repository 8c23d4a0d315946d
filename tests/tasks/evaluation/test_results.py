"""Results of evaluations by step, and of language-model tasks: metrics, and data that cannot be read."""

import errno
import json
import sys
from types import SimpleNamespace

import httpx2
import pytest

from profiles.files import run_files
from profiles.resolve import load
from tasks.evaluation import checkpoints, harness, results
from tasks.evaluation.average import AverageStep
from tasks.evaluation.checkpoints import CheckpointEvaluationStep, TaskStep, digest_of_tasks, metrics_of
from tasks.evaluation.harness import metrics_of as numbers_of
from tasks.failures import FatalError
from tasks.launchers.base import Unavailable
from tasks.step import Context
from tasks.steps.jobs import cluster_job
from tasks.store.artifacts import ArtifactId
from tasks.store.run_folder import CheckpointId
from tasks.store.store import Store


def test_results_may_come_in_any_order_and_the_latest_value_at_a_step_counts(tmp_path):
    store = Store(str(tmp_path))
    folder = store.run_folder("run").prepare("identity")
    assert results.record(store, "run", 20, {"validation_loss": 2.5})
    assert results.record(store, "run", 10, {"validation_loss": 3.0})
    assert results.record(store, "run", 20, {"validation_loss": 2.4, "lm_eval/colours/acc": 0.5})
    assert not results.record(store, "run", 20, {"validation_loss": 2.4})  # known
    expected = {10: {"validation_loss": 3.0}, 20: {"validation_loss": 2.4, "lm_eval/colours/acc": 0.5}}
    assert results.read(folder) == expected
    assert list(results.read(folder)) == [10, 20]


def test_results_of_a_rolled_back_checkpoint_are_superseded_at_its_step(tmp_path):
    store = Store(str(tmp_path))
    folder = store.run_folder("run").prepare("identity")
    results.record(store, "run", 10, {"validation_loss": 9.0, "lm_eval/colours/acc": 0.1})  # earlier version
    assert results.record(store, "run", 10, {"validation_loss": 9.0}, "spike")
    assert results.read(folder) == {10: {"validation_loss": 9.0, "lm_eval/colours/acc": 0.1}}
    assert not results.record(store, "run", 10, {"validation_loss": 9.0}, "spike")
    assert results.record(store, "run", 10, {"validation_loss": 9.0}, "written again")
    assert results.read(folder) == {10: {"validation_loss": 9.0}}


def test_numeric_metrics_of_a_task_are_renamed():
    found = {"alias": "colours", "acc,none": 0.5, "acc_stderr,none": "N/A", "exact_match,strict": 1}
    assert numbers_of(found) == {"acc": 0.5, "exact_match/strict": 1.0}
    assert metrics_of({"results": {"colours": {"acc": 0.5}}}) == {"lm_eval/colours/acc": 0.5}


def test_an_edited_task_file_changes_the_digest_of_tasks(tmp_path):
    task = tmp_path / "colours.yaml"
    task.write_text("task: colours")
    before = digest_of_tasks(tmp_path)
    (tmp_path / "notes.md").write_text("no part of a task")
    assert digest_of_tasks(tmp_path) == before
    task.write_text("task: colours\nmetadata: {version: 2}")
    assert digest_of_tasks(tmp_path) != before


UNREACHABLE = ConnectionError("Couldn't reach 'org/name' on the Hub")
STALE = OSError(errno.ESTALE, "Stale file handle")


@pytest.mark.parametrize(
    ("error", "offline", "kind"),
    [
        (STALE, False, Unavailable),
        (STALE, True, Unavailable),
        (httpx2.ReadTimeout("the read timed out"), False, Unavailable),
        (UNREACHABLE, False, Unavailable),
        (UNREACHABLE, True, FatalError),
        (FileNotFoundError("no such data"), False, FatalError),
    ],
)
def test_task_is_retried_if_reading_its_data_again_may_succeed(tmp_path, monkeypatch, error, offline, kind):
    """The job runs in this process, with an lm-eval that raises the error."""

    def simple_evaluate(**options):
        raise error

    def run_job(profile, job, output):
        options = SimpleNamespace(model="", task=["colours"], limit=None, batch_size="1", device="cpu")
        output.write_text(json.dumps(harness.evaluate(options, None)))

    monkeypatch.setitem(sys.modules, "lm_eval", SimpleNamespace(simple_evaluate=simple_evaluate))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    monkeypatch.setattr("tasks.steps.jobs.run_job", run_job)
    monkeypatch.setattr(checkpoints, "write_model", lambda *arguments: arguments[-1].mkdir())
    store = Store(str(tmp_path))
    folder = store.run_folder("run").prepare("identity")
    (folder / run_files.LOGS).mkdir()
    step = TaskStep("colours", CheckpointId(10, "digest"), None)
    with pytest.raises(
        kind, match=r"the data of colours cannot be read .*; without a network, use tasks"
    ) as caught:
        step.make(Context(load("tiny"), store, folder), "key")
    assert isinstance(caught.value, FatalError) == (kind is FatalError)


def test_evaluation_of_a_checkpoint_stays_cached_when_its_run_is_extended(tmp_path):
    store = Store(str(tmp_path))
    folder, step = store.run_folder("run").prepare("identity"), CheckpointEvaluationStep(None, "digest")
    profiles = [load("tiny", [f"train.steps={steps}"]) for steps in (300, 400)]
    first, extended = (step.key(Context(profile, store, folder)) for profile in profiles)
    assert first == extended


def test_job_of_an_average_reads_its_weights_in_place_of_the_runs_in_a_remote_store(tmp_path):
    store, id = Store("memory://averages", tmp_path), ArtifactId("dataset", "key")
    context = Context(load("tiny"), store, store.run_folder("trunk").prepare("identity"))
    with store.artifacts.publish(id, {}) as staging:
        (staging / "file").touch()
    dataset = store.artifacts.expect(id)
    options = AverageStep(dataset, "identity", tokenizer=dataset).job_options(context, "key")
    arguments = cluster_job("evaluate", context, "key", dataset, None, **options).arguments
    assert arguments[arguments.index("--checkpoints") + 1] == str(store.scratch_folder("average-key"))
    # In the order of earlier versions, by which a restarted flow finds its job.
    order = ["--run-folder", "--cache", "--dataset", "--artifacts", "--checkpoints"]
    assert [each for each in arguments if each.startswith("--")][:5] == order


def test_evaluations_of_a_fork_and_of_its_parent_export_to_separate_folders():
    copied = CheckpointId(10, "digest of the marker, which a fork copies")
    assert checkpoints.scratch_name("parent", copied) != checkpoints.scratch_name("fork", copied)
