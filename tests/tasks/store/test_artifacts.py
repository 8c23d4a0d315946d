"""Artifacts are atomic, corruption is found and repaired, and concurrent writers are safe."""

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import fsspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profiles.files import state_files
from tasks.store import locks, mirrored_artifacts
from tasks.store.artifacts import Artifact, ArtifactId
from tasks.store.backends.objects import ObjectBackend
from tasks.store.manifest import Corrupted, Manifest
from tasks.store.store import Store
from tests import faults

K1, D1 = ArtifactId("tokens", "k1"), ArtifactId("dataset", "d1")
FILES = {"model.bin": b"weights" * 1000, "deep/er/tokens.idx": b"\x00\x01\x02", "empty": b""}


def publish(store, kind="tokens", key="k1", files=FILES, **options) -> Artifact:
    with store.artifacts.publish(ArtifactId(kind, key), {"tokens": 3}, **options) as folder:
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
    return store.artifacts.expect(ArtifactId(kind, key))


def files_of(store) -> list[str]:
    """All files of a local store but those of locks."""
    root = Path(store.uri)
    return sorted(
        str(path.relative_to(root))
        for path in root.rglob("*")
        if path.is_file() and "locks" not in path.parts
    )


def start(store, code: str) -> subprocess.Popen:
    """Another process with `store` and `artifacts` of the same store."""
    setup = (
        "import os, sys, time\nfrom tasks.store.artifacts import ArtifactId\nfrom tasks.store.store import Store\n"
        "store = Store(sys.argv[1])\nartifacts = store.artifacts\nK1 = ArtifactId('tokens', 'k1')\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", setup + textwrap.dedent(code), store.uri], stdout=subprocess.PIPE, text=True
    )


def test_find_returns_a_published_artifact_with_its_summary_and_manifest(store):
    assert store.artifacts.find(K1) is None
    published = publish(store)
    found = store.artifacts.find(K1)
    assert found == published == Artifact(K1, str(store.artifacts.path(found)), {"tokens": 3})
    for name, content in FILES.items():
        assert (store.artifacts.path(found) / name).read_bytes() == content
    manifest = json.loads((store.artifacts.path(found) / "manifest.json").read_text())
    assert (manifest["kind"], manifest["key"], manifest["summary"]) == ("tokens", "k1", {"tokens": 3})
    sizes = {file["name"]: file["size"] for file in manifest["files"]}
    assert sizes == {name: len(content) for name, content in FILES.items()}


def test_publish_reads_the_summary_at_the_end_of_the_block(store):
    summary = {}
    with store.artifacts.publish(K1, summary):
        summary["tokens"] = 7
    assert store.artifacts.find(K1).summary == {"tokens": 7}


def test_publish_discards_the_files_of_a_block_that_raises(store):
    def interrupted() -> None:
        with store.artifacts.publish(K1) as folder:
            (folder / "partial").write_bytes(b"partial")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert store.artifacts.find(K1) is None
    assert files_of(store) == []


def test_an_artifact_is_invisible_before_the_block_ends(store):
    with store.artifacts.publish(K1) as folder:
        (folder / "file").write_bytes(b"data")
        assert store.artifacts.find(K1) is None
        assert not (Path(store.uri) / "artifacts/tokens/k1").exists()
    assert store.artifacts.find(K1)


@pytest.mark.parametrize("bad", ["../k", "", "a/b", ".hidden", "k~1"])
def test_names_cannot_leave_the_store(store, bad):
    with pytest.raises(ValueError, match="invalid name"), store.artifacts.publish(ArtifactId("tokens", bad)):
        pass
    with pytest.raises(ValueError, match="invalid name"):
        store.artifacts.find(ArtifactId(bad, "k1"))
    with pytest.raises(ValueError, match="expected <kind>/<key>"):
        ArtifactId.parse(f"tokens/{bad}")


def test_publish_rejects_links_and_manifests(store, tmp_path):
    publishing = store.artifacts.publish(K1)
    with pytest.raises(ValueError, match=r"link is not a regular file"), publishing as folder:
        (folder / "link").symlink_to(tmp_path)
    publishing = store.artifacts.publish(K1)
    with pytest.raises(ValueError, match=r"manifest\.json"), publishing as folder:
        (folder / "manifest.json").write_text("{}")
    assert store.artifacts.find(K1) is None


def flip_bit(path: Path) -> None:
    """Change the contents of a file, but neither its size nor its mtime."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    times = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


CORRUPTIONS = {
    "deleted": lambda path: path.unlink(),
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "extended": lambda path: path.open("ab").write(b"x"),
    "flipped": flip_bit,
}


@pytest.mark.parametrize("corruption", CORRUPTIONS)
@pytest.mark.parametrize("name", ["model.bin", "deep/er/tokens.idx", "manifest.json"])
def test_corruption_is_found_named_and_repaired_under_the_lock(store, caplog, name, corruption):
    published = publish(store)
    other = publish(store, key="k2")
    folder = store.artifacts.path(published)
    CORRUPTIONS[corruption](folder / name)
    before = files_of(store)
    with caplog.at_level(logging.WARNING):
        assert store.artifacts.find(K1) is None
    assert len(caplog.messages) == 1
    assert name in caplog.text
    assert "k1" in caplog.text
    assert files_of(store) == before  # a reader moves nothing: a job may be using the files
    with store.artifacts.lock(K1):
        assert store.artifacts.find(K1) is None
        assert not folder.exists()
        assert publish(store) == published
    assert store.artifacts.find(ArtifactId("tokens", "k2")) == other
    assert store.artifacts.find(K1) == published
    quarantined = Path(store.uri) / "quarantine/tokens-k1-1"
    assert name in (quarantined / "reason.txt").read_text()
    assert (quarantined / "empty").exists()


REPLACEMENTS = {"dangling": lambda path: path.symlink_to("nowhere"), "pipe": os.mkfifo, "file": Path.touch}


@pytest.mark.parametrize("replace", REPLACEMENTS.values(), ids=REPLACEMENTS)
def test_what_is_in_place_of_an_artifact_is_moved_to_quarantine(store, replace):
    folder = store.artifacts.path(publish(store))
    shutil.rmtree(folder)
    replace(folder)
    with store.artifacts.lock(K1):
        assert store.artifacts.find(K1) is None
        published = publish(store)
    assert store.artifacts.find(K1) == published
    quarantined = Path(store.uri) / "quarantine/tokens-k1-1"
    assert {path.name for path in quarantined.iterdir()} == {"k1", "reason.txt"}


@pytest.mark.parametrize("folder", ["artifacts/tokens", "artifacts", "staging", "locks"])
@pytest.mark.parametrize("replace", REPLACEMENTS.values(), ids=REPLACEMENTS)
def test_what_is_in_place_of_a_folder_of_the_store_is_named(tmp_path, replace, folder):
    path = tmp_path / "store" / folder
    path.parent.mkdir(parents=True)
    replace(path)
    store = Store(str(tmp_path / "store"))
    expected = f"is where a folder belongs; move it away: '{path}'"
    with pytest.raises(NotADirectoryError, match=re.escape(expected)), store.artifacts.lock(K1):
        publish(store)


@pytest.mark.parametrize("error", faults.ERRORS)
@pytest.mark.parametrize("at", ["tokens/k1", "deep", "model.bin", "manifest.json"])
def test_a_failed_read_is_raised_and_changes_nothing(store, monkeypatch, at, error):
    monkeypatch.setattr(state_files, "DELAYS", (0.0,))
    published, before = publish(store), files_of(store)
    with monkeypatch.context() as patch:
        faults.inject(patch, Path(store.uri), faults.failing("scandir", "open", path=at, error=error))
        with pytest.raises(OSError, match=os.strerror(error)), store.artifacts.lock(K1):
            store.artifacts.find(K1)
    assert files_of(store) == before
    assert store.artifacts.find(K1) == published


def test_a_holder_that_lost_the_lock_publishes_nothing(store):
    def late() -> None:
        with store.artifacts.lock(K1) as lock, store.artifacts.publish(K1) as folder:
            (folder / "model.bin").write_bytes(b"late")
            store.backend.create(f"locks/tokens-k1/{lock.ticket + 1}", locks._state(60.0))

    with pytest.raises(locks.LockLost, match="tokens-k1"):
        late()
    assert store.artifacts.find(K1) is None


@pytest.mark.parametrize("name", ["../escaped", "/tmp/escaped", "a/../../escaped"])
def test_a_manifest_that_names_files_outside_its_artifact_is_corrupted(name):
    hostile = Manifest.of_listing({name: 1}, K1).to_bytes()
    with pytest.raises(Corrupted, match=r"manifest\.json"):
        Manifest.from_bytes(hostile, K1)


@settings(max_examples=40)
@given(data=st.data())
def test_any_flipped_bit_of_any_file_is_found(tmp_path_factory, data):
    store = Store(str(tmp_path_factory.mktemp("store")))
    folder = store.artifacts.path(publish(store))
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    path = data.draw(st.sampled_from(paths))
    content = bytearray(path.read_bytes())  # the manifest's length varies with the recorded seconds
    content[data.draw(st.integers(0, 10**6)) % len(content)] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    assert store.artifacts.find(K1) is None


def test_a_deleted_artifact_is_missing_without_a_warning(store, caplog):
    folder = store.artifacts.path(publish(store))
    for path in sorted(folder.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    assert store.artifacts.find(K1) is None
    assert caplog.messages == []
    assert publish(store)


def test_find_verifies_required_artifacts_and_only_the_corrupted_one_is_rebuilt(store, caplog):
    shards = [publish(store, key=key) for key in ("k1", "k2")]
    requires = [shard.id for shard in shards]
    corpus = publish(store, "dataset", "d1", {"corpus.json": b"{}"}, requires=requires)
    flip_bit(store.artifacts.path(shards[1]) / "model.bin")
    assert store.artifacts.find(D1) is None
    assert "tokens k2: model.bin" in caplog.text
    assert store.artifacts.find(K1) == shards[0]
    publish(store, key="k2")
    assert store.artifacts.find(D1) == corpus
    store.artifacts.remove(K1)
    assert store.artifacts.find(D1) is None
    assert "requires tokens k1" in caplog.text


def test_the_first_of_two_writers_wins(store):
    with store.artifacts.publish(K1, {"by": "second"}) as folder:
        (folder / "file").write_bytes(b"second")
        first = publish(store)
    assert store.artifacts.find(K1) == first
    assert all((store.artifacts.path(first) / name).exists() for name in FILES)
    assert not (store.artifacts.path(first) / "file").exists()


def test_the_second_writer_replaces_a_corrupted_artifact(store):
    with store.artifacts.publish(K1, {"by": "second"}) as folder:
        (folder / "file").write_bytes(b"second")
        flip_bit(store.artifacts.path(publish(store)) / "model.bin")
    assert store.artifacts.find(K1).summary == {"by": "second"}


def test_concurrent_processes_publish_one_complete_artifact(store):
    code = """
        print("ready", flush=True)
        while not os.path.exists(sys.argv[1] + "-go"):
            pass
        for number in range(40):
            with artifacts.publish(ArtifactId("tokens", f"k{number}"), {"by": os.getpid()}) as folder:
                for name in "abc":
                    (folder / name).write_bytes(str(os.getpid()).encode() * 5000)
        """
    writers = [start(store, code) for _ in range(3)]
    for writer in writers:
        assert writer.stdout.readline() == "ready\n"
    Path(store.uri + "-go").touch()
    for writer in writers:
        assert writer.wait(60) == 0
    for number in range(40):
        artifact = store.artifacts.expect(ArtifactId("tokens", f"k{number}"))
        assert store.artifacts.find(ArtifactId("tokens", f"k{number}")) == artifact
        content = str(artifact.summary["by"]).encode() * 5000
        assert {(store.artifacts.path(artifact) / name).read_bytes() for name in "abc"} == {content}
    assert not [name for name in files_of(store) if name.startswith("staging")]


def test_a_process_killed_before_the_manifest_publishes_nothing(store, caplog):
    code = """
        with artifacts.publish(K1) as folder:
            (folder / "model.bin").write_bytes(b"x" * 10000)
            print("written", flush=True)
            time.sleep(60)
        """
    writer = start(store, code)
    assert writer.stdout.readline() == "written\n"
    assert store.artifacts.find(K1) is None
    publish(store, key="k2")  # keeps the staging folder of a live process
    assert any("model.bin" in name for name in files_of(store) if name.startswith("staging"))
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    assert store.artifacts.find(K1) is None
    with caplog.at_level(logging.INFO):
        publish(store)
    assert "interrupted process" in caplog.text
    assert not [name for name in files_of(store) if name.startswith("staging")]


def test_a_process_killed_between_manifest_and_rename_publishes_nothing(store):
    code = """
        type(artifacts)._publish = lambda *arguments: os.kill(os.getpid(), 9)
        with artifacts.publish(K1) as folder:
            (folder / "model.bin").write_bytes(b"x")
        """
    assert start(store, code).wait(60) == -signal.SIGKILL
    assert any("manifest.json" in name for name in files_of(store))
    assert store.artifacts.find(K1) is None
    assert publish(store)


def test_a_store_can_be_moved(store, tmp_path):
    published = publish(store)
    Path(store.uri).rename(tmp_path / "elsewhere")
    found = Store(str(tmp_path / "elsewhere")).artifacts.find(K1)
    assert (found.key, found.summary) == (published.key, published.summary)
    with pytest.raises(FileNotFoundError, match="tokens k1 is not in the store"):
        store.artifacts.path(published)


def test_files_beyond_the_hash_limit_are_verified_by_size(store):
    limit = 5000
    published = publish(store)
    flip_bit(store.artifacts.path(published) / "model.bin")  # 7000 bytes
    assert store.artifacts.find(K1, limit) == published
    os.truncate(store.artifacts.path(published) / "model.bin", 6999)
    assert store.artifacts.find(K1, limit) is None


def test_many_required_artifacts_of_a_kind_are_listed_with_one_request(remote, monkeypatch):
    monkeypatch.setattr(mirrored_artifacts, "LIST_WHOLE_KIND", 3)
    store = remote("here")
    keys = ["k1", "k2", "k3"]
    for key in keys:
        publish(store, key=key)
    requires = [ArtifactId("tokens", key) for key in keys]
    corpus = publish(store, "dataset", "d1", {}, requires=requires)
    listed, list_files = [], ObjectBackend.files
    monkeypatch.setattr(
        ObjectBackend, "files", lambda self, path: [listed.append(path), list_files(self, path)][1]
    )
    assert remote("there").artifacts.find(D1) == corpus
    assert listed == ["artifacts/dataset/d1", "artifacts/tokens"]
    store.backend.remove("artifacts/tokens/k2/model.bin")
    assert remote("there").artifacts.find(D1) is None


def test_a_remote_artifact_and_what_it_requires_are_downloaded_to_another_machine(remote):
    here, there = remote("here"), remote("there")
    with here.artifacts.lock(K1):
        shard = publish(here)
    requires = [K1]
    corpus = publish(here, "dataset", "d1", {"corpus.json": b"{}"}, requires=requires)
    assert there.artifacts.find(D1) == corpus
    folder = there.artifacts.path(corpus)
    assert (folder / "corpus.json").read_bytes() == b"{}"
    assert (folder.parent.parent / "tokens/k1/deep/er/tokens.idx").read_bytes() == FILES["deep/er/tokens.idx"]
    flip_bit(there.artifacts.path(shard) / "model.bin")  # the local copy is downloaded again
    assert (there.artifacts.path(shard) / "model.bin").read_bytes() == FILES["model.bin"]


def test_a_remote_artifact_without_a_manifest_does_not_exist(remote):
    here, there = remote("here"), remote("there")
    publish(here)
    here.backend.remove("artifacts/tokens/k1/manifest.json")  # as after an interrupted upload
    assert there.artifacts.find(K1) is None
    published = publish(there)
    assert published == there.artifacts.find(K1) == here.artifacts.find(K1)


def test_a_corrupted_remote_artifact_is_never_returned(remote):
    here, there = remote("here"), remote("there")
    published = publish(here)
    here.backend.write("artifacts/tokens/k1/model.bin", b"Weights" * 1000)
    with pytest.raises(Corrupted, match=r"model\.bin"):  # sizes are equal, so it is found by downloading
        there.artifacts.path(published)
    assert there.artifacts.find(K1) is None
    assert publish(there)
    here.backend.write("artifacts/tokens/k1/model.bin", b"short")
    assert there.artifacts.find(K1) is None
    assert publish(there)
    assert (there.artifacts.path(published) / "model.bin").read_bytes() == FILES["model.bin"]
    contents = [there.backend.read(f"quarantine/tokens-k1-{number}/model.bin") for number in (1, 2, 3)]
    assert contents == [b"Weights" * 1000, b"short", None]
    assert b"model.bin has 5 bytes" in there.backend.read("quarantine/tokens-k1-2/reason.txt")


@pytest.mark.parametrize("files", [None, {**FILES, "model.bin": b"other"}])
def test_an_artifact_that_is_replaced_during_its_download_is_downloaded_again(tmp_path, monkeypatch, files):
    fsspec.filesystem("memory").store.clear()
    here, there = (Store("memory://bucket/store", tmp_path / machine) for machine in ("here", "there"))
    published = publish(here)
    download = ObjectBackend.download

    def replaced(self, *arguments) -> None:
        monkeypatch.setattr(ObjectBackend, "download", download)
        with here.artifacts.lock(K1):
            here.artifacts.quarantine(K1, "replaced")
            if files:
                publish(here, files=files)
        download(self, *arguments)

    monkeypatch.setattr(ObjectBackend, "download", replaced)
    if files:
        assert (there.artifacts.path(published) / "model.bin").read_bytes() == b"other"
    else:
        with pytest.raises(FileNotFoundError, match="tokens k1 is not in the store: memory://bucket/store"):
            there.artifacts.path(published)
    assert here.backend.read("quarantine/tokens-k1-1/reason.txt") == b"replaced\n"
    assert here.backend.read("quarantine/tokens-k1-2/reason.txt") is None
