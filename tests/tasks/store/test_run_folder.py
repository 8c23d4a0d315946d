"""Run folders resume by identity, and are never overwritten."""

import pytest

from profiles.errors import ProfileError


def test_prepare_returns_the_existing_folder_of_the_same_identity(store):
    folder = store.run_folder("tiny").prepare("one")
    (folder / "metrics.jsonl").write_text("{}")
    assert store.run_folder("tiny").prepare("one") == folder == store.run_folder("tiny").path
    assert (folder / "metrics.jsonl").exists()


def test_runs_are_moved_aside_to_the_next_free_name(store):
    for identity in ("one", "two", "three"):
        run = store.run_folder("tiny")
        if run.identity:
            run.move_aside()
        (run.prepare(identity) / "metrics.jsonl").write_text(identity)
    runs = store.run_folder("tiny").path.parent
    contents = {path.name: (path / "metrics.jsonl").read_text() for path in runs.iterdir()}
    assert contents == {"tiny~1": "one", "tiny~2": "two", "tiny": "three"}


def test_a_folder_with_metrics_but_no_identity_is_not_taken_for_a_new_run(store):
    folder = store.run_folder("tiny").prepare("one")
    (folder / "metrics.jsonl").write_text("{}")
    (folder / "run.json").unlink()
    with pytest.raises(ProfileError, match=r"has metrics.jsonl but no run.json"):
        store.run_folder("tiny").prepare("one")


def test_prepare_downloads_a_run_that_another_machine_replaced(remote):
    here, there = remote("here"), remote("there")
    for machine, identity in ((here, "one"), (there, "two")):
        (machine.run_folder("tiny").prepare(identity) / "metrics.jsonl").write_text(identity)
        machine.run_folder("tiny").sync().upload()
    folder = here.run_folder("tiny").prepare("two")
    assert (folder / "metrics.jsonl").read_text() == "two"
    assert (folder.with_name("tiny~1") / "metrics.jsonl").read_text() == "one"
