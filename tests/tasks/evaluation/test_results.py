"""Results of evaluations by step, and metrics of language-model tasks."""

from tasks.evaluation import results
from tasks.evaluation.checkpoints import digest_of_tasks, metrics_of
from tasks.evaluation.harness import metrics_of as numbers_of
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
