"""Opening a run of an existing name with changed settings."""

import pytest

from profiles.errors import ProfileError
from profiles.resolve import load
from tasks.fork import find_parent
from tasks.launchers import Job
from tasks.launchers.local import LocalLauncher
from tasks.store import activities, runs
from tasks.store.artifacts import ArtifactId
from tasks.store.garbage import find_garbage


def test_a_schedule_is_not_changed_under_an_active_job(store, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "waits.py").write_text("import time\ntime.sleep(600)\n")
    profile, longer = (load("tiny", [f"train.steps={steps}"]) for steps in (10, 20))
    folder = runs.open_run(store, profile, "identity", "flow run", {})
    launcher = LocalLauncher()
    training = launcher.submit(Job("train", "waits", (), folder / "logs"))
    try:
        with pytest.raises(ProfileError, match="its train job is still active as process"):
            runs.open_run(store, longer, "identity", "another flow run", {})
        assert load(str(folder / "profile.yaml")).train.steps == 10
        rarer = load("tiny", ["train.steps=10", "checkpoint.every=7"])
        assert runs.open_run(store, rarer, "identity", "another flow run", {}) == folder
        assert (
            f"keeps its settings: checkpoint.every is {profile.checkpoint.every} there, 7 here" in caplog.text
        )
    finally:
        launcher.cancel(training, grace=0)
    assert runs.open_run(store, longer, "identity", "another flow run", {}) == folder
    assert load(str(folder / "profile.yaml")).train.steps == 20


def test_explicit_default_keeps_the_mathematics(store):
    written, default, other = (
        load("tiny", [f"train.balance_coefficient={value}"]) for value in ("0.001", "null", "0.002")
    )
    folder = runs.open_run(store, written, "identity", "flow run", {})
    (folder / "checkpoints/step_5").mkdir(parents=True)
    (folder / "checkpoints/step_5/complete.json").write_text("{}")
    runs.check_name(store, default)
    with pytest.raises(runs.RunExists, match=r"balance_coefficient is 0\.001 there, 0\.002 here"):
        runs.check_name(store, other)
    epochs = load("tiny", ["train.balance_coefficient=0.002", "train.steps=null", "train.epochs=1"])
    with pytest.raises(runs.RunExists, match="0\\.002 here"):  # though its number of steps is not known yet
        runs.check_name(store, epochs)


def test_trained_run_with_an_unreadable_profile_is_not_continued(store):
    """Its learning rates could change unnoticed."""
    profile = load("tiny", ["train.steps=10"])
    folder = runs.open_run(store, profile, "identity", "flow run", {})
    (folder / "profile.yaml").write_text("of: another version\n")
    runs.open_run(store, profile, "identity", "flow run", {})
    (folder / "profile.yaml").unlink()
    (folder / "checkpoints/step_5").mkdir(parents=True)
    (folder / "checkpoints/step_5/complete.json").write_text("{}")
    with pytest.raises(ProfileError, match=r"profile\.yaml cannot be read, so its learning rates"):
        runs.open_run(store, profile, "identity", "flow run", {})
    runs.open_run(store, profile, "identity", "flow run", {}, replace=True)


@pytest.mark.parametrize("kind", activities.READERS)
def test_a_run_is_not_replaced_while_its_checkpoints_are_read(store, kind):
    folder = runs.open_run(store, load("tiny"), "one", "flow run", {})
    other = load("tiny", ["train.learning_rate=1e-2"])
    with (
        activities.begin(store, kind, "tiny"),
        pytest.raises(ProfileError, match=r"process \d+ on .* the run that this one replaces"),
    ):
        runs.open_run(store, other, "two", "flow run", {}, replace=True)
    assert store.run_folder("tiny").identity == "one"
    assert runs.open_run(store, other, "two", "flow run", {}, replace=True) == folder
    assert store.run_folder("tiny").identity == "two"


def test_a_path_is_no_name_of_a_run_and_files_of_other_programs_are_no_runs(store):
    folder = runs.open_run(store, load("tiny"), "identity", "flow run", {})
    with pytest.raises(ProfileError, match=r"no such run .*; nearest valid: tiny"):
        runs.fetch(store, str(folder))
    with pytest.raises(ProfileError, match="no such run"):
        find_parent(store, f"{folder}@200", "child")
    (folder.parent / ".DS_Store").touch()
    (folder.parent / "my notes").mkdir()
    (folder.parent / "my notes/a.txt").touch()
    assert [*runs.files_by_run(store)] == ["tiny"]
    folder.rename(folder.with_name("tiny~2"))  # replaced, by others that are corrupted
    for name in ("tiny", "tiny~1"):
        folder.with_name(name).mkdir()
        (folder.with_name(name) / "run.json").write_text("{")
    found = runs.find_folder(store, "tiny", "identity")
    assert found is not None
    assert found.name == "tiny~2"
    with pytest.raises(ValueError, match=r"tiny/run\.json"):
        runs.find_folder(store, "tiny", "another")


def test_what_a_run_on_another_disk_uses_is_no_garbage(store, tmp_path):
    folder = runs.open_run(store, load("tiny"), "identity", "flow run", {"dataset": "d"})
    with store.artifacts.publish(ArtifactId("dataset", "d"), {}):
        pass
    moved = folder.rename(tmp_path / "disk")
    folder.symlink_to(moved)
    assert "inputs.json" in runs.files_by_run(store)["tiny"]
    assert find_garbage(store)[0] == []
    moved.rename(tmp_path / "not mounted")
    with pytest.raises(ValueError, match="which is missing: what runs use is unknown"):
        find_garbage(store)
