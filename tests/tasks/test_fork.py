"""Forks of runs whose parent still trains, and removes checkpoints meanwhile."""

import pytest

from profiles.errors import ProfileError
from profiles.resolve import load
from tasks.fork import copy_checkpoint, find_parent, hold_checkpoint, record_data
from tasks.store import ledger, runs
from tasks.store.run_folder import Parent
from tasks.store.store import Store

INPUTS = {"tokenizer": "t", "dataset": "d", "checkpoint": None}


@pytest.fixture(params=["folder", "memory"])
def store(request, tmp_path) -> Store:
    """A store with the run `parent`, which has checkpoints of steps 100 and 200."""
    if request.param == "memory":
        import fsspec

        fsspec.filesystem("memory").store.clear()
    store = Store("memory://bucket/store" if request.param == "memory" else str(tmp_path), tmp_path)
    runs.open_run(store, load("tiny", (), "parent"), "one", "flow", INPUTS)
    save(store, 100)
    save(store, 200)
    return store


def save(store: Store, step: int) -> None:
    for file in ("0.distcp", "complete.json"):
        store.backend.write(f"runs/parent/checkpoints/step_{step}/{file}", b"{}")


def remove(store: Store, step: int) -> None:
    store.backend.remove(f"runs/parent/checkpoints/step_{step}")


def open_child(store: Store, parent: Parent, dataset: str = "d") -> None:
    inputs = {**INPUTS, "dataset": dataset}
    runs.open_run(store, load("tiny", (), "child"), "two", "flow", inputs, parent=parent)


def test_a_fork_keeps_its_checkpoint_while_the_parent_trains_on(store):
    parent = find_parent(store, "parent", "child")
    hold_checkpoint(store, parent, "child")
    remove(store, 200)
    hold_checkpoint(store, parent, "child")  # started again
    open_child(store, parent)
    copy_checkpoint(store, parent, "child")
    child = store.run_folder("child")
    assert child.checkpoint_steps() == [200]
    assert child.files("checkpoints").keys() == {"step_200/0.distcp", "step_200/complete.json"}
    assert not child.files("checkpoints.partial")


@pytest.mark.parametrize("removed", ["", "/complete.json"])
def test_a_fork_of_a_removed_checkpoint_is_rejected(store, removed):
    parent = find_parent(store, "parent", "child")
    store.backend.remove(f"runs/parent/checkpoints/step_200{removed}")
    open_child(store, parent)
    with pytest.raises(ProfileError, match=r"fork = parent@200: .* nearest valid: parent@100"):
        copy_checkpoint(store, parent, "child")
    assert store.run_folder("child").checkpoint_steps() == []


def test_a_fork_whose_checkpoints_are_corrupted_does_not_start_over(store):
    parent = find_parent(store, "parent", "child")
    open_child(store, parent)
    copy_checkpoint(store, parent, "child")
    store.run_folder("child").quarantine_checkpoint("checkpoints/step_200", "corrupted")
    copy_checkpoint(store, parent, "child")
    assert store.run_folder("child").checkpoint_steps() == []


@pytest.mark.parametrize("opened", [False, True])
def test_the_same_command_resumes_a_fork_whose_parent_has_trained_on(store, opened):
    parent = find_parent(store, "parent", "child")
    hold_checkpoint(store, parent, "child")
    if opened:
        open_child(store, parent)
        copy_checkpoint(store, parent, "child")
    save(store, 300)
    remove(store, 200)
    assert find_parent(store, "parent", "child") == find_parent(store, "parent@200", "child") == parent
    assert find_parent(store, "parent", "other").step == find_parent(store, "parent@300", "child").step == 300
    store.run_folder("parent").move_aside()
    runs.open_run(store, load("tiny", (), "parent"), "another", "flow", INPUTS)
    save(store, 200)
    assert find_parent(store, "parent", "child").identity == "another"


def test_the_data_of_parents_that_never_ended_is_recorded(store, caplog):
    for key in ("d", "e"):
        with store.artifacts.publish("dataset", key) as folder:
            (folder / "shards.json").write_text(f'["shard of {key}"]')
    parent = find_parent(store, "parent", "child")
    open_child(store, parent, dataset="e")
    ledger.record(store, "grandchild", "three", store.artifacts.expect("dataset", "e"), "two")
    record_data(store, Parent("child", "two", 300))
    assert ledger.trained_on(store, "three") == {"shard of d", "shard of e"}
    record_data(store, Parent("removed", "four", 1))
    assert "run removed: its training data is unknown" in caplog.text
