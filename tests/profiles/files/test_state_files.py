"""State files that lost their contents are named, or count as absent; an unreadable one is neither."""

import io
import json
import os
import re
from pathlib import Path

import pytest
from fsspec.implementations import local

from flows.cli.runs import tensorboard
from modeling.compilation import graph_cache
from modeling.training import metrics
from parallel.checkpoint import locations, object_stores
from profiles import resolve
from profiles.files import state_files
from profiles.files.jsonl import LogFollower
from profiles.rules.data_sources import check_local_files
from profiles.rules.pretrained import check_initial_weights
from profiles.schema import Source
from tasks.launchers import latest_jobs
from tasks.sources import weights
from tasks.store import runs
from tasks.store.store import Store, open_store
from tests import faults


@pytest.mark.parametrize("text", ["", "\0\0\0", '{"identifier": "7', "[1]"])
def test_corrupted_file_counts_as_absent_with_a_warning(tmp_path, caplog, text):
    path = tmp_path / "train.job.json"
    assert state_files.read_json(path) is None
    assert not caplog.records
    path.write_text(text)
    assert state_files.read_json(path) is None
    assert f"{path}: corrupted" in caplog.text
    state_files.write(path, '{"identifier": "8"}')
    assert state_files.read_json(path) == {"identifier": "8"}
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_missing_keys_values_of_other_types_and_pipes_are_corruptions(tmp_path, caplog):
    path = tmp_path / "train.job.json"
    for text, wrong in (
        ('{"log_start": 1}', "identifier"),
        ('{"identifier": "7", "log_start": [1]}', "log_start"),
    ):
        path.write_text(text)
        types = {"identifier": str, "log_start": int}
        assert state_files.read_json(path, types, ["identifier"]) is None
        assert f"{path}: corrupted (missing or invalid {wrong})" in caplog.text
        with pytest.raises(state_files.CorruptedState, match=rf"{path}: corrupted .*{wrong}.*; restore"):
            state_files.require_json(text.encode(), path, types, ["identifier"])
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(state_files.NotRegularFile, match=r"is not a regular file.*train\.job\.json"):
        state_files.read_json(path)
    with pytest.raises(state_files.NotRegularFile):
        list(LogFollower(path).rows())


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch, os.mkfifo, lambda path: path.symlink_to("/")])
def test_anything_can_be_removed(tmp_path, make):
    """`shutil.rmtree` waits for the writer of a pipe, and fails for a file or a link."""
    make(tmp_path / "there")
    state_files.remove(tmp_path / "there")
    assert not os.path.lexists(tmp_path / "there")
    state_files.remove(tmp_path / "nothing")


def test_line_is_appended_after_one_that_was_cut_off(tmp_path):
    path = tmp_path / "events.jsonl"
    for line in ("1", "2"):
        state_files.append_line(path, line)
    path.write_text(path.read_text() + '{"half')
    state_files.append_line(path, "3")
    assert path.read_text() == '1\n2\n{"half\n3\n'


def test_file_that_cannot_be_read_is_an_error(tmp_path):
    with pytest.raises(IsADirectoryError):
        state_files.read_json(tmp_path)


def check_texts(pattern):
    check_local_files([Source(kind="files", path=str(pattern))], "data.sources")


@pytest.mark.parametrize(
    ("file", "decide"),
    [
        ("metrics.jsonl", lambda folder: metrics.truncate(folder / "metrics.jsonl", 1)),
        ("cache.tar", lambda folder: graph_cache.unpack(folder, folder)),
        ("profile.yaml", lambda folder: runs.fetch(Store(str(folder)), "tiny")),
        ("runs", lambda folder: open_store("memory://store", folder)),
        ("runs", lambda folder: state_files.make_folder(folder / "runs")),
        ("runs", lambda folder: [*latest_jobs(folder / "runs")]),
        ("runs", lambda folder: locations.discard(folder / "runs")),
        ("run.json", lambda folder: weights.pin(str(folder / "runs"), None, None, "init.from", None)),
        (
            "profile.yaml",
            lambda folder: check_initial_weights(resolve.load("tiny", [f"init.from={folder}/profile.yaml"])),
        ),
        ("runs", lambda folder: check_texts(folder / "runs/**/*.txt")),
        ("a.txt", lambda folder: check_texts(folder / "runs/*/a.txt")),
        ("runs", lambda folder: tensorboard.log_folder(None, str(folder))),
        ("tiny", lambda folder: object_stores.find(local.LocalFileSystem(), str(folder))),
    ],
)
def test_file_whose_status_cannot_be_read_is_not_taken_for_missing(tmp_path, monkeypatch, file, decide):
    for path in ("metrics.jsonl", "cache.tar", "runs/tiny/profile.yaml", "runs/tiny/inputs.json"):
        state_files.write(tmp_path / path, "")
    state_files.write(tmp_path / "runs/tiny/run.json", '{"identity": "1"}')
    open_store(str(tmp_path))
    monkeypatch.setattr(state_files, "DELAYS", (0.0,))
    monkeypatch.setattr(locations, "READ_PAUSES", (0.0,))
    faults.inject(monkeypatch, tmp_path, faults.failing(*faults.READS, path=file))
    with pytest.raises(OSError, match="Input/output error"):
        decide(tmp_path)


def test_packages_do_not_call_what_takes_a_failed_read_for_absence():
    calls = (
        r"(\.r?glob|\bos\.walk|\bPath\(.*\)\.walk)\(",
        r"\b_?(files|filesystem)\.(exists|isfile|isdir|walk|find|makedirs)\(",  # fsspec's
        r"(?<!\bentry)\.(exists|is_file|is_dir|is_symlink)\(\)",  # an os.DirEntry raises errors
        r"os\.path\.(l?exists|isfile|isdir|islink)\(",
        r"\.mkdir\((parents=True, )?exist_ok=True\)",
    )
    root, packages = Path(__file__).parents[3], ("flows", "tasks", "modeling", "parallel", "profiles")
    files = (file for package in packages for file in (root / package).rglob("*.py"))
    found = [file for file in files if re.search("|".join(calls), file.read_text())]
    assert found == [root / "parallel/checkpoint/object_stores.py"]  # whose functions replace fsspec's


def test_link_to_itself_and_impossible_names_count_as_missing(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    assert not any(state_files.exists(tmp_path / name) for name in ("missing", "loop", "long" * 100, "\0"))


def test_file_that_is_read_in_part_is_read_again_before_it_is_parsed(tmp_path, monkeypatch):
    profile, marker = tmp_path / "tiny.yaml", {"step": 1, "files": {"a": {"size": 1}}}
    profile.write_text("extends: tiny\ntrain: {steps: 7}\n")
    state_files.write(tmp_path / "step_1/complete.json", json.dumps(marker))
    monkeypatch.setattr(state_files, "DELAYS", (0.0,) * 3)
    monkeypatch.setattr(locations, "READ_PAUSES", (0.0,) * 3)
    faults.inject(monkeypatch, tmp_path, faults.AtFirst())
    monkeypatch.setattr(local, "open", io.open, False)  # by which fsspec reads local files
    assert resolve.load(str(profile)).train.steps == 7
    assert locations.read_marker(tmp_path / "step_1") == marker
