"""Run folders resume by identity, and are never overwritten."""

import errno
import fcntl
from pathlib import Path
from unittest.mock import Mock

import fsspec
import pytest

from profiles.errors import ProfileError
from profiles.files import state_files
from profiles.files.file_locks import locked
from tasks.store import run_artifacts
from tasks.store.artifacts import ArtifactId
from tasks.store.backends.objects import ObjectBackend
from tasks.store.run_folder import RunFolder
from tasks.store.store import Store
from tests import faults

TRAINING = ArtifactId("training", "t1")


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


def test_a_folder_with_metrics_but_no_identity_is_rejected(store):
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


def test_prepare_downloads_a_run_that_was_resumed_on_another_machine(remote):
    """The earlier copy here would count its attempts from where it stopped."""
    here, there = remote("here"), remote("there")
    for machine, attempt in ((here, 1), (there, 3)):
        folder = machine.run_folder("tiny").prepare("one")
        (folder / "metrics.jsonl").write_text(f"of attempt {attempt}")
        (folder / "attempt").write_text(str(attempt))
        machine.run_folder("tiny").sync().upload()
    (here.run_folder("tiny").path / "graphs").mkdir()
    (here.run_folder("tiny").path / "graphs/cache").write_text("kept")
    folder = here.run_folder("tiny").prepare("one")
    assert (folder / "metrics.jsonl").read_text() == "of attempt 3"
    assert (folder / "attempt").read_text() == "3"
    assert (folder / "graphs/cache").read_text() == "kept"


def write_files(folder: Path, **files: str) -> None:
    """Write files of a run folder; `__` in a keyword stands for a dot, `___` for a slash."""
    for name, text in files.items():
        path = folder / name.replace("___", "/").replace("__", ".")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def machines(tmp_path) -> tuple[RunFolder, RunFolder]:
    """One run on two machines."""
    fsspec.filesystem("memory").store.clear()
    here, there = (Store("memory://bucket/store", tmp_path / machine) for machine in ("here", "there"))
    return here.run_folder("tiny"), there.run_folder("tiny")


def test_takeover_from_a_copy_of_the_same_attempt_keeps_the_rows_since_that_copy(tmp_path):
    """Such as the copy that an evaluation downloaded while another machine trained."""
    here, there = machines(tmp_path)
    folder = there.prepare("one")
    write_files(folder, attempt="1", metrics__jsonl="1\n", attempts__jsonl="1\n", profile__yaml="name: tiny")
    there.sync().upload()
    write_files(here.prepare("one"), attempts__jsonl="1\nof this machine\n", profile__yaml="name: new")
    write_files(folder, metrics__jsonl="1\n2\n3\n", logs___train__log="step 3", resumed__json="{}")
    write_files(folder, attempts__jsonl="1\n2\n", logs___task__json="{}")
    there.sync().upload()
    folder = here.prepare("one")
    assert (folder / "metrics.jsonl").read_text() == "1\n2\n3\n"
    assert (folder / "logs/train.log").read_text() == "step 3"
    assert (folder / "resumed.json").read_text() == "{}"
    # Kept, since it is longer here, or may have been written here.
    assert (folder / "attempts.jsonl").read_text() == "1\nof this machine\n"
    assert (folder / "profile.yaml").read_text() == "name: new"
    assert not (
        folder / "logs/task.json"
    ).exists()  # a result of a job that the other machine uses and removes
    write_files(folder, attempt="2")
    here.sync().upload()
    assert here.read("metrics.jsonl") == b"1\n2\n3\n"


def test_files_of_the_machine_that_trains_are_not_replaced_by_longer_ones(tmp_path):
    """After a rollback, its metrics are shorter than the store's, and open in its job."""
    here, _ = machines(tmp_path)
    folder = here.prepare("one")
    write_files(folder, attempt="1", metrics__jsonl="1\n2\n", events__jsonl="1\n", resumed__json="{}")
    write_files(folder, evaluations__jsonl="1\n", logs___task__json="{}", logs___train__log="1\n")
    here.sync().upload()
    fsspec.filesystem("memory").pipe_file("/bucket/store/runs/tiny/evaluations.jsonl", b"1\n2\n")
    write_files(folder, metrics__jsonl="1\n", evaluations__jsonl="1\n")
    for name in ("events.jsonl", "resumed.json", "logs/task.json"):
        (folder / name).unlink()
    assert here.prepare("one") == folder
    assert (folder / "metrics.jsonl").read_text() == "1\n"
    assert (folder / "events.jsonl").read_text() == "1\n"
    assert (folder / "evaluations.jsonl").read_text() == "1\n2\n"
    # Removed by the user so that the request is applied again, and by the step that used the result.
    assert not (folder / "resumed.json").exists()
    assert not (folder / "logs/task.json").exists()


@pytest.mark.parametrize("stored", ["1", "2"])
def test_an_attempt_that_begins_during_a_download_is_not_replaced(tmp_path, monkeypatch, stored):
    """Such as of a run that is resumed while an evaluation downloads it."""
    here, there = machines(tmp_path)
    write_files(there.prepare("one"), attempt="1", metrics__jsonl="1\n")
    there.sync().upload()
    folder = here.prepare("one")
    write_files(there.path, attempt=stored, metrics__jsonl="1\n2\n")
    there.sync().upload()
    download = ObjectBackend.download

    def slow(*arguments) -> None:
        download(*arguments)
        with pytest.raises(BlockingIOError), locked(lock, wait=False):  # keeps other processes waiting
            pass
        write_files(folder, attempt="3", metrics__jsonl="of attempt 3")

    lock = tmp_path / "here/locks/prepare-tiny"
    monkeypatch.setattr(ObjectBackend, "download", slow)
    assert here.prepare("one") == folder
    assert (folder / "attempt").read_text() == "3"
    assert (folder / "metrics.jsonl").read_text() == "of attempt 3"


def test_a_run_whose_identity_cannot_be_read_is_left_alone(store, monkeypatch):
    monkeypatch.setattr(state_files, "DELAYS", (0.0,))
    run = store.run_folder("tiny")
    folder = run.prepare("one")
    with monkeypatch.context() as patch:
        faults.inject(patch, folder, faults.failing("open", path="run.json", error=errno.ESTALE))
        with pytest.raises(OSError, match="Stale file handle"):
            run.prepare("one")
    (folder / "run.json").write_text("")
    for read in (lambda: run.prepare("one"), lambda: run.stored_identity):
        with pytest.raises(
            state_files.CorruptedState, match=r"runs/tiny/run\.json: corrupted .empty.; restore the file"
        ):
            read()
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"]


def test_only_complete_checkpoints_at_their_path_count(store):
    folder = store.run_folder("tiny").prepare("one")
    for name in ("step_26", "step_25.bak", "keep/step_40", "step_-1", "step_", "step_27~1"):
        (folder / "checkpoints" / name).mkdir(parents=True)
        (folder / "checkpoints" / name / "complete.json").write_text("{}")
    (folder / "checkpoints/step_30").mkdir()
    assert store.run_folder("tiny").checkpoint_steps() == [26]
    with pytest.raises(RuntimeError, match=r"step_28: has no files"):
        run_artifacts.publish(store, TRAINING, "tiny", "checkpoints/step_28", {})


def test_a_corrupted_checkpoint_goes_to_quarantine_under_the_lock_only(store):
    folder = store.run_folder("tiny").prepare("one") / "checkpoints/step_4"
    folder.mkdir(parents=True)
    for name in ("complete.json", "0.distcp"):
        (folder / name).write_text(name)
    made = run_artifacts.publish(store, TRAINING, "tiny", "checkpoints/step_4", {})
    assert run_artifacts.find(store, TRAINING, "tiny") == made
    (folder / "0.distcp").write_text("1.distcp")
    assert run_artifacts.find(store, TRAINING, "tiny") is None
    assert (folder / "complete.json").exists()
    with store.artifacts.lock(TRAINING):
        assert run_artifacts.find(store, TRAINING, "tiny") is None
    assert store.run_folder("tiny").checkpoint_steps() == []
    moved = folder.parent / "quarantine/step_4"
    assert (moved / "0.distcp").read_text() == "1.distcp"
    assert "0.distcp is corrupted" in (moved / "reason.txt").read_text()
    assert (folder.parents[3] / "quarantine/training-t1-1/points-to.json").exists()


def test_a_checkpoint_that_was_trained_again_replaces_the_copies_of_its_artifact(tmp_path):
    fsspec.filesystem("memory").store.clear()
    here, there = (Store("memory://bucket/store", tmp_path / machine) for machine in ("here", "there"))
    here.run_folder("tiny").prepare("one")

    def train(store, name: str):
        store.backend.write(f"runs/tiny/checkpoints/step_4/{name}.distcp", name.encode())
        store.backend.write("runs/tiny/checkpoints/step_4/complete.json", b"{}")
        return run_artifacts.publish(store, TRAINING, "tiny", "checkpoints/step_4", {})

    with here.artifacts.lock(TRAINING):
        train(here, "first")
    assert run_artifacts.find(there, TRAINING, "tiny")
    here.backend.remove("runs/tiny/checkpoints/step_4")
    with here.artifacts.lock(TRAINING):
        assert run_artifacts.find(here, TRAINING, "tiny") is None
        assert there.artifacts.find(TRAINING) is None  # its copy is not uploaded meanwhile
        made = train(here, "second")
    for store in (here, there):
        with store.artifacts.lock(TRAINING):
            assert run_artifacts.find(store, TRAINING, "tiny") == made
    assert here.run_folder("tiny").checkpoint_steps() == [4]
    here.artifacts.remove(TRAINING)
    assert here.artifacts.find(TRAINING) is None


def test_a_checkpoint_is_downloaded_as_it_is_now_and_removed_by_its_last_user(tmp_path, monkeypatch):
    fsspec.filesystem("memory").store.clear()
    store = Store("memory://bucket/store", tmp_path)
    run, part = store.run_folder("tiny"), "checkpoints/step_4"

    def save(name: str) -> None:
        store.backend.remove(f"runs/tiny/{part}")
        store.backend.write(f"runs/tiny/{part}/{name}.distcp", name.encode())
        store.backend.write(f"runs/tiny/{part}/complete.json", name.encode())

    def copies() -> list[str]:
        return [path.name for path in tmp_path.rglob("*.distcp")]

    def interrupt(**options: bool) -> None:
        with pytest.raises(KeyboardInterrupt), run.local_checkpoint(part, **options):
            raise KeyboardInterrupt

    with pytest.raises(FileNotFoundError, match="tiny/checkpoints/step_4: is not a complete"):
        interrupt()
    save("first")
    interrupt(keep_on_error=True)  # such as a process that is killed
    assert copies() == ["first.distcp"]
    save("second")
    with run.local_checkpoint(part) as copy:
        assert copy.name == "step_4"
        assert [path.name for path in sorted(copy.iterdir())] == ["complete.json", "second.distcp"]
        interrupt()
        assert (copy / "second.distcp").read_text() == "second"
    assert copies() == ["first.distcp"]

    with monkeypatch.context() as without_locks:
        without_locks.setattr(
            fcntl, "flock", Mock(side_effect=OSError(errno.ENOSYS, "Function not implemented"))
        )
        with run.local_checkpoint(part) as copy:
            assert (copy / "second.distcp").read_text() == "second"
    interrupt()  # removes the copy, which perhaps another process used

    files = RunFolder.files
    monkeypatch.setattr(RunFolder, "files", lambda *arguments: (save("third"), files(*arguments))[1])
    with (
        pytest.raises(OSError, match="replaced while it was downloaded; try again"),
        run.local_checkpoint(part),
    ):
        pass
    assert copies() == ["first.distcp"]


def test_an_interrupted_restore_leaves_no_truncated_files(remote, monkeypatch):
    here, there = remote("here"), remote("there")
    folder = here.run_folder("tiny").prepare("one")
    files = {"metrics.jsonl": '{"step": 1}\n' * 100, "graphs.json": "{}", "logs/train.log": "started\n"}
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    here.run_folder("tiny").sync().upload()
    download = ObjectBackend.download

    def interrupted(self, name, names, folder, *arguments):
        download(self, name, names, folder, *arguments)
        (folder / "metrics.jsonl").write_text("{")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ObjectBackend, "download", interrupted)
        with pytest.raises(KeyboardInterrupt):
            there.run_folder("tiny").prepare("one")
    folder = there.run_folder("tiny").prepare("one")
    assert {name: (folder / name).read_text() for name in files} == files


def test_names_of_a_bucket_cannot_leave_the_run_folder(tmp_path):
    run = Store("memory://bucket/store", tmp_path).run_folder("tiny")
    for name in ("complete.json", "../../../escaped"):
        fsspec.filesystem("memory").pipe_file(
            f"/bucket/store/runs/tiny/checkpoints/step_4/{name}", b"escaped"
        )
    with (
        pytest.raises(ValueError, match=r"'\.\./\.\./\.\./escaped' is not the name of a file"),
        run.local_checkpoint("checkpoints/step_4"),
    ):
        pass
    assert not list(tmp_path.rglob("escaped"))
