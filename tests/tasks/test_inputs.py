"""The lockfile: a resumed run keeps the commits and files it started with, without network access."""

import json
import shutil
from pathlib import Path

import fsspec
import pytest

from profiles.errors import ProfileError
from profiles.resolve import load as resolve_profile
from tasks.inputs import Lockfile, locate_runs, resolve
from tasks.store import run_artifacts
from tasks.store.artifacts import ArtifactId
from tasks.store.store import Store
from tests.tasks.source_files import files


def profile(*sources: dict, **keys: str):
    overrides = [f"{key}={value}" for key, value in keys.items()]
    return resolve_profile("tiny", [f"data.sources={json.dumps(sources)}", *overrides])


def stored(inputs) -> Lockfile:
    """The lock as a resumed run reads it."""
    return Lockfile.from_bytes(inputs.lockfile.to_bytes(), "lock.json")


def test_a_locked_run_keeps_its_commits_and_files_without_requests(hub, store, tmp_path):
    hub.commit("org/model", {"README.md": b"1"})
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_text("one")
    wanted = profile(files(tmp_path / "texts"), tokenizer="{source: org/model}", init="{from: org/model}")
    first = resolve(wanted, store)
    hub.commit("org/model", {"README.md": b"2"})
    (tmp_path / "texts/b.txt").write_text("two")

    asked = len(hub.requests)
    again = resolve(wanted, store, lockfile=stored(first))
    assert len(hub.requests) == asked
    assert (again.tokenizer, again.shards, again.weights) == (first.tokenizer, first.shards, first.weights)

    updated = resolve(wanted, store)
    assert updated.tokenizer["commit"] != first.tokenizer["commit"]
    assert updated.weights["digest"] != first.weights["digest"]
    assert updated.shards != first.shards


def test_only_changed_references_are_resolved_again(hub, store, tmp_path):
    hub.commit("org/model", {"README.md": b"1"})
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(name)
    tokenizer = "{source: org/model}"
    first = resolve(profile(files(tmp_path / "a.txt"), tokenizer=tokenizer), store)
    hub.commit("org/model", {"README.md": b"2"})
    both = (files(tmp_path / "b.txt", use="validation"), files(tmp_path / "a.txt", use="train"))
    changed = resolve(profile(*both, tokenizer=tokenizer), store, lockfile=stored(first))
    assert changed.tokenizer == first.tokenizer
    assert [(shard.source, shard.use) for shard in changed.shards] == [(0, "validation"), (1, "train")]
    assert changed.shards[1].digest == first.shards[0].digest


def test_an_export_of_a_run_is_resolved_again_while_it_exists(store, tmp_path):
    weights = tmp_path / "store/runs/tiny/export/model.safetensors"
    store.run_folder("tiny").prepare("one")
    weights.parent.mkdir()
    weights.write_bytes(b"1")
    wanted = locate_runs(resolve_profile("tiny-sft", ["init.from=run:tiny"]), store)
    first = resolve(wanted, store)
    assert first.weights["run"] == {"name": "tiny", "identity": "one"}
    weights.write_bytes(b"2")
    assert resolve(wanted, store, lockfile=stored(first)).weights == first.weights
    changed = resolve(wanted, store, lockfile=stored(first).without_exports())
    assert changed.weights["digest"] != first.weights["digest"]
    shutil.rmtree(weights.parent)
    assert resolve(wanted, store, lockfile=stored(first).without_exports()).weights == first.weights
    folder = weights.parent.parent.with_name("my model") / "export"  # not the name of a run
    folder.mkdir(parents=True)
    (folder / weights.name).write_bytes(b"1")
    found = resolve(resolve_profile("tiny-sft", [f"init.from={folder}", "tokenizer.source=train"]), store)
    assert found.weights == {"digest": first.weights["digest"], "commit": None}


@pytest.mark.parametrize("data", [b"", b'{"format": 1', b'{"format": 9, "answers": {}}', b"[]"])
def test_corrupted_lock_is_rejected_with_advice(data):
    with pytest.raises(ValueError, match=r"runs/tiny/lock.json: not a lockfile: .*; --update"):
        Lockfile.from_bytes(data, "runs/tiny/lock.json")


def test_run_without_an_export_is_rejected_with_advice_for_its_store(store, tmp_path):
    def rejected(name: str) -> str:
        with pytest.raises(ProfileError) as caught:
            locate_runs(resolve_profile("tiny-sft", [f"init.from=run:{name}"]), store)
        return str(caught.value)

    none = f"init.from = run:tiny: the store {store.uri} has no run tiny with an export"
    assert rejected("tiny") == f"{none}; train it first: trainshed run tiny --store {store.uri}"
    for name, file in (("tiny-1", "export/config.json"), ("tiny-2", "run.json"), ("other", "export/x")):
        path = tmp_path / "store/runs" / name / file
        path.parent.mkdir(parents=True)
        path.write_text("{}")
    assert rejected("tiny").endswith(f"--store {store.uri}; nearest valid: run:tiny-1, run:other")
    assert rejected("tiny-3").endswith("no run tiny-3 with an export; nearest valid: run:tiny-1, run:other")


def test_the_export_of_a_run_on_another_machine_is_downloaded(tmp_path):
    fsspec.filesystem("memory").store.clear()
    here, there = (Store("memory://bucket/store", tmp_path / machine) for machine in ("here", "there"))
    folder = there.run_folder("tiny").prepare("one")
    (folder / "export").mkdir()
    (folder / "export/model.safetensors").write_bytes(b"1")
    there.run_folder("tiny").sync().upload()
    wanted = resolve_profile("tiny-sft", ["init.from=run:tiny"])
    round_located = locate_runs(wanted, here, required=False)
    assert not here.run_folder("tiny").path.exists()
    found = locate_runs(wanted, here)
    assert round_located == found
    assert (Path(found.init.from_) / "model.safetensors").read_bytes() == b"1"


def test_an_export_that_another_machine_has_replaced_is_downloaded_again(tmp_path):
    fsspec.filesystem("memory").store.clear()
    here, there = (Store("memory://bucket/store", tmp_path / machine) for machine in ("here", "there"))
    folder = there.run_folder("tiny").prepare("one")
    here.run_folder("tiny").prepare("one")

    def export(weights: bytes) -> None:
        (folder / "export").mkdir(exist_ok=True)
        (folder / "export/model.safetensors").write_bytes(weights)
        key = weights.decode()
        run_artifacts.publish(there, ArtifactId("export", key), "tiny", "export", {})
        there.run_folder("tiny").write("artifacts.json", json.dumps({"export": ["removed", key]}).encode())

    def located() -> bytes:
        found = locate_runs(resolve_profile("tiny-sft", ["init.from=run:tiny"]), here)
        return (Path(found.init.from_) / "model.safetensors").read_bytes()

    export(b"1")
    there.run_folder("tiny").sync().upload()
    assert located() == b"1"
    export(b"2")
    with pytest.raises(
        ProfileError, match=r"export of tiny has not been uploaded completely .model.safetensors"
    ):
        located()
    assert (here.run_folder("tiny").path / "export/model.safetensors").read_bytes() == b"1"
    there.run_folder("tiny").sync().upload()
    assert located() == b"2"
