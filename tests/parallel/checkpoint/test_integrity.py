"""Loading detects corruption on all ranks; failed reads are retried, never mistaken for corruption."""

import errno
import json
import os
from functools import partial
from pathlib import Path

import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from parallel.checkpoint import checkpoint, files, locations
from parallel.checkpoint.saver import Saver
from tests.parallel.checkpoint.test_checkpoint import Case, build, trained_optimizer


@pytest.fixture
def saved(tmp_path) -> Path:
    checkpoint.save(tmp_path / "step_1", trained_optimizer(width=9000), {"step": 1})
    return tmp_path / "step_1"


def flip(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1]))


def shard(saved: Path) -> Path:
    (path,) = saved.glob("*.distcp")
    return path


def test_every_flipped_bit_is_detected_and_its_file_named(saved, monkeypatch):
    readinto, raised = files._BlockFile.readinto, []

    def record(self, buffer):
        try:
            return readinto(self, buffer)
        except Exception as error:
            raised.append(error)
            raise

    monkeypatch.setattr(files._BlockFile, "readinto", record)
    loaded = trained_optimizer(width=9000)
    for path in (shard(saved), *saved.glob("*.checksums"), saved / ".metadata"):
        size = path.stat().st_size
        for position in {*range(0, size, size // 20), size - 1}:
            flip(path, position)
            with pytest.raises(locations.CorruptCheckpoint, match=f"step_1/{path.name}: corrupted"):
                checkpoint.load(saved, loaded)
            flip(path, position)
    checkpoint.load(saved, loaded)
    assert (
        raised == []
    )  # torch may call Python again with the error set, which some versions of Python notice


def test_corruption_found_by_one_rank_is_raised_on_all(tmp_path, pool):
    errors = pool.run(load_with_corrupted_file_of_rank_1, 2, folder=tmp_path)
    assert errors[0] == errors[1]
    assert "_1_0.distcp: corrupted" in errors[0]


def load_with_corrupted_file_of_rank_1(folder: Path) -> str:
    trainer, optimizer = build(Case(data=2))
    try:
        checkpoint.save(folder / "step_1", optimizer, {})
        if trainer.mesh.rank == 0:
            flip(next((folder / "step_1").glob("*_1_0.distcp")), 30_000)
        Saver(optimizer)._on_rank_0(lambda: None)  # the other rank waits for the flip
        with pytest.raises(locations.CorruptCheckpoint) as raised:
            checkpoint.load(folder / "step_1", optimizer)
        return str(raised.value)
    finally:
        trainer.mesh.close()


@pytest.mark.parametrize("checksums", [True, False])
def test_truncated_or_missing_file_is_corruption(saved, checksums):
    if not checksums:  # as in checkpoints from before there were checksums
        marker = json.loads((saved / locations.MARKER).read_text())
        del marker["files"]
        (saved / locations.MARKER).write_text(json.dumps(marker))
        next(saved.glob("*.checksums")).unlink()
    checkpoint.load(saved, loaded := trained_optimizer(width=9000))
    path = shard(saved)
    path.write_bytes(path.read_bytes()[:50_000])
    with pytest.raises(locations.CorruptCheckpoint, match=rf"step_1/{path.name}: corrupted"):
        checkpoint.load(saved, loaded)
    path.unlink()
    with pytest.raises(locations.CorruptCheckpoint, match=rf"step_1/{path.name}: missing"):
        checkpoint.load(saved, loaded)
    (saved / locations.MARKER).write_text("")
    with pytest.raises(locations.CorruptCheckpoint, match=r"step_1: complete.json is corrupted"):
        checkpoint.load(saved, loaded)


def test_marker_with_other_values_and_a_pipe_in_place_of_a_file_are_corruption(saved):
    loaded, marker = trained_optimizer(width=9000), saved / "complete.json"
    about = json.loads(marker.read_text())
    for change in ({"files": None}, {"files": {".metadata": 5}}, {"optimizer_steps": "1"}):
        marker.write_text(json.dumps(about | change))
        with pytest.raises(locations.CorruptCheckpoint, match=r"complete\.json is corrupted"):
            checkpoint.load(saved, loaded)
    marker.write_text(json.dumps(about))
    for path in (shard(saved), saved / ".metadata", marker):
        path.rename(kept := saved.parent / "kept")
        links = (partial(Path.symlink_to, target=target) for target in ("nowhere", path.name))
        for make in (os.mkfifo, Path.mkdir, *links):
            make(path)
            with pytest.raises(locations.CorruptCheckpoint, match=f"{path}: corrupted: not a regular file"):
                checkpoint.load(saved, loaded)
            path.rmdir() if path.is_dir() else path.unlink()
        kept.rename(path)
    checkpoint.load(saved, loaded)


def test_failed_read_is_retried_and_then_raised_as_such(saved, monkeypatch):
    monkeypatch.setattr(locations, "READ_PAUSES", (0.0, 0.0))
    opened, failures = Path.open, []

    def open_stale(path, *arguments, **named):
        if path.suffix == ".distcp" and failures:
            raise OSError(failures.pop(), "stale file handle")
        return opened(path, *arguments, **named)

    monkeypatch.setattr(Path, "open", open_stale)
    failures += [errno.ESTALE] * 2
    checkpoint.load(saved, loaded := trained_optimizer(width=9000))
    assert not failures
    failures += [errno.ESTALE] * 3
    with pytest.raises(checkpoint.LoadFailed, match=r"rank 0: .*distcp.*stale file handle"):
        checkpoint.load(saved, loaded)


def test_checkpoint_whose_marker_cannot_be_read_is_not_discarded(saved, monkeypatch):
    monkeypatch.setattr(locations, "READ_PAUSES", ())
    info = LocalFileSystem.info

    def stale(self, path, **named):
        if str(path).endswith(locations.MARKER):
            raise OSError(errno.ESTALE, "stale file handle")
        return info(self, path, **named)

    with monkeypatch.context() as patch:
        patch.setattr(LocalFileSystem, "info", stale)
        with pytest.raises(OSError, match="stale"):
            locations.discard_incomplete(saved.parent)
    checkpoint.load(saved, trained_optimizer(width=9000))


@pytest.mark.parametrize("absolute", [True, False])
def test_linked_checkpoint_stays_intact_where_it_is(saved, tmp_path, absolute):
    location, contents = tmp_path / "other run", sorted(saved.iterdir())
    location.mkdir()
    link, target = location / "step_1", saved if absolute else Path("../step_1")
    link.symlink_to(target)
    locations.discard(link)
    assert not link.is_symlink()
    link.symlink_to(target)
    aside = tmp_path / "deeper/aside"
    locations.move_aside(location, [1], aside)
    assert (aside / "step_1").resolve() == saved
    link.symlink_to(target)
    moved = locations.quarantine(location, 1, "why")
    assert (moved.resolve(), link.is_symlink()) == (saved, False)
    assert sorted(saved.iterdir()) == contents
    checkpoint.load(saved, trained_optimizer(width=9000))


@pytest.mark.parametrize("corrupted", [False, True])
def test_interrupted_move_in_an_object_store_continues_where_it_was(monkeypatch, corrupted):
    """In calls that copy several objects at once; the marker follows in the last."""
    location, store, calls = f"memory://interrupted-{corrupted}/checkpoints", MemoryFileSystem(), []
    names = [f"{number}.distcp" for number in range(4)]
    for name in (*names, locations.MARKER):
        store.pipe_file(f"{location}/step_1/{name}", b"{}")

    def copy(self, sources, targets):
        several = isinstance(sources, list)
        pairs = [*zip(sources, targets, strict=True)] if several else [(sources, targets)]
        calls.append([locations.name_of(source) for source, _ in pairs])
        for source, target in pairs[: 3 if len(calls) == 1 else None]:
            self.cp_file(source, target)
        if len(calls) == 1:
            raise KeyboardInterrupt

    def move() -> str:
        if corrupted:
            return locations.quarantine(location, 1, "why")
        locations.move_aside(location, [1], f"{location}~1")
        return f"{location}~1/step_1"

    monkeypatch.setattr(MemoryFileSystem, "copy", copy)
    with pytest.raises(KeyboardInterrupt):
        move()
    moved = move()
    assert calls == [names, names[3:], [locations.MARKER]]
    marker = locations.CORRUPTED_MARKER if corrupted else locations.MARKER
    assert {*locations.sizes(moved)} - {"reason.txt"} == {*names, marker}
    assert store.find(f"{location}/step_1") == []


def test_only_folders_named_as_steps_count(saved):
    root = saved.parent
    for name in ("step_1.bak", "step_0x", "step_01", "backup/step_2", "quarantine/step_3"):
        (root / name).mkdir(parents=True)
        (root / name / locations.MARKER).write_text("{}")
    assert [step for step, _ in locations.complete_checkpoints(root)] == [1]
    assert locations.discard_incomplete(root) == []
    moved = locations.quarantine(root, 1, "why")
    assert (moved / "reason.txt").read_text() == "why\n"
    assert locations.quarantined(root) == ["step_1", "step_3"]
    assert not (moved / locations.MARKER).exists()
    assert list(locations.complete_checkpoints(root)) == []
