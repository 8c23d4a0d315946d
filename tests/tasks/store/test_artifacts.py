"""The store: artifacts appear whole or not at all, damage is noticed, and two writers do no harm."""

import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.store.artifacts import Artifact
from tasks.store.manifest import Corrupted
from tasks.store.store import Store
from tests import s3

FILES = {"model.bin": b"weights" * 1000, "deep/er/tokens.idx": b"\x00\x01\x02", "empty": b""}


def publish(store, kind="tokens", key="k1", files=FILES, **more) -> Artifact:
    with store.artifacts.publish(kind, key, {"tokens": 3}, **more) as folder:
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
    return store.artifacts.expect(kind, key)


def everything_in(store) -> list[str]:
    """All files of a store in a folder, but for those of locks."""
    root = Path(store.uri)
    return sorted(
        str(path.relative_to(root))
        for path in root.rglob("*")
        if path.is_file() and "locks" not in path.parts
    )


def start(store, code: str) -> subprocess.Popen:
    """Another process with a `store`; it says something on standard output when it is where the test wants it."""
    setup = "import os, sys, time\nfrom tasks.store.store import Store\nstore = Store(sys.argv[1])\n"
    return subprocess.Popen(
        [sys.executable, "-c", setup + textwrap.dedent(code), store.uri], stdout=subprocess.PIPE, text=True
    )


def test_what_was_published_is_found_with_its_summary(store):
    assert store.artifacts.find("tokens", "k1") is None
    made = publish(store)
    found = store.artifacts.find("tokens", "k1")
    assert found == made == Artifact("tokens", "k1", str(store.artifacts.path(made)), {"tokens": 3})
    for name, content in FILES.items():
        assert (store.artifacts.path(found) / name).read_bytes() == content


def test_a_reference_survives_json(store):
    made = publish(store)
    assert Artifact.from_json(json.loads(json.dumps(made.to_json()))) == made


def test_the_manifest_says_what_is_there(store):
    manifest = json.loads((store.artifacts.path(publish(store)) / "manifest.json").read_text())
    assert (manifest["kind"], manifest["key"], manifest["summary"]) == ("tokens", "k1", {"tokens": 3})
    assert {file["name"]: file["size"] for file in manifest["files"]} == {
        name: len(content) for name, content in FILES.items()
    }


def test_the_summary_may_be_filled_in_within_the_block(store):
    summary = {}
    with store.artifacts.publish("tokens", "k1", summary):
        summary["tokens"] = 7
    assert store.artifacts.find("tokens", "k1").summary == {"tokens": 7}


def test_nothing_is_published_where_the_block_raises(store):
    def interrupted() -> None:
        with store.artifacts.publish("tokens", "k1") as folder:
            (folder / "half").write_bytes(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert store.artifacts.find("tokens", "k1") is None
    assert everything_in(store) == []


def test_nothing_is_visible_before_the_block_ends(store):
    with store.artifacts.publish("tokens", "k1") as folder:
        (folder / "file").write_bytes(b"data")
        assert store.artifacts.find("tokens", "k1") is None
        assert not (Path(store.uri) / "artifacts/tokens/k1").exists()
    assert store.artifacts.find("tokens", "k1")


@pytest.mark.parametrize("bad", ["../k", "", "a/b", ".hidden", "k~1"])
def test_a_key_cannot_lead_out_of_the_store(store, bad):
    with pytest.raises(ValueError, match="invalid name"), store.artifacts.publish("tokens", bad):
        pass
    with pytest.raises(ValueError, match="invalid name"):
        store.artifacts.find(bad, "k1")


def test_links_and_foreign_manifests_are_refused(store, tmp_path):
    with (
        pytest.raises(ValueError, match=r"link is not a regular file"),
        store.artifacts.publish("tokens", "k1") as folder,
    ):
        (folder / "link").symlink_to(tmp_path)
    with (
        pytest.raises(ValueError, match=r"manifest\.json"),
        store.artifacts.publish("tokens", "k1") as folder,
    ):
        (folder / "manifest.json").write_text("{}")
    assert store.artifacts.find("tokens", "k1") is None


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    times = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # size and time are as before


DAMAGE = {
    "deleted": lambda path: path.unlink(),
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "grown": lambda path: path.open("ab").write(b"x"),
    "flipped": flip,
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["model.bin", "deep/er/tokens.idx", "manifest.json"])
def test_damage_is_noticed_named_and_mended_by_publishing_again(store, caplog, name, damage):
    made = publish(store)
    other = publish(store, key="k2")
    DAMAGE[damage](store.artifacts.path(made) / name)
    with caplog.at_level(logging.WARNING):
        assert store.artifacts.find("tokens", "k1") is None
    assert len(caplog.messages) == 1
    assert name in caplog.text
    assert "k1" in caplog.text
    assert not store.artifacts.path(other).with_name("k1").exists()
    assert store.artifacts.find("tokens", "k2") == other
    assert publish(store) == made
    assert store.artifacts.find("tokens", "k1") == made


@settings(max_examples=40)
@given(data=st.data())
def test_any_flipped_bit_of_any_file_is_noticed(tmp_path_factory, data):
    store = Store(str(tmp_path_factory.mktemp("store")))
    folder = store.artifacts.path(publish(store))
    path = data.draw(
        st.sampled_from(sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size))
    )
    content = bytearray(path.read_bytes())  # the manifest's length varies with the seconds that it names
    content[data.draw(st.integers(0, 10**6)) % len(content)] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    assert store.artifacts.find("tokens", "k1") is None


def test_a_deleted_folder_is_as_if_it_had_never_been(store, caplog):
    folder = store.artifacts.path(publish(store))
    for path in sorted(folder.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    assert store.artifacts.find("tokens", "k1") is None
    assert caplog.messages == []
    assert publish(store)


def test_what_an_artifact_requires_is_verified_with_it_and_only_the_damaged_one_goes(store, caplog):
    shards = [publish(store, key=key) for key in ("k1", "k2")]
    requires = [{"kind": shard.kind, "key": shard.key} for shard in shards]
    corpus = publish(store, "dataset", "d1", {"corpus.json": b"{}"}, requires=requires)
    flip(store.artifacts.path(shards[1]) / "model.bin")
    assert store.artifacts.find("dataset", "d1") is None
    assert "tokens k2: model.bin" in caplog.text
    assert store.artifacts.find("tokens", "k1") == shards[0]
    publish(store, key="k2")
    assert store.artifacts.find("dataset", "d1") == corpus
    store.artifacts.remove("tokens", "k1")
    assert store.artifacts.find("dataset", "d1") is None
    assert "requires tokens k1" in caplog.text


def test_the_second_of_two_writers_drops_its_own(store):
    with store.artifacts.publish("tokens", "k1", {"by": "second"}) as folder:
        (folder / "file").write_bytes(b"second")
        first = publish(store)
    assert store.artifacts.find("tokens", "k1") == first
    assert sorted(FILES) == sorted(name for name in FILES if (store.artifacts.path(first) / name).exists())
    assert not (store.artifacts.path(first) / "file").exists()


def test_the_second_writer_stays_where_the_first_ones_is_damaged(store):
    with store.artifacts.publish("tokens", "k1", {"by": "second"}) as folder:
        (folder / "file").write_bytes(b"second")
        flip(store.artifacts.path(publish(store)) / "model.bin")
    assert store.artifacts.find("tokens", "k1").summary == {"by": "second"}


def test_processes_that_publish_the_same_at_once_leave_one_whole_artifact(store):
    code = """
        print("ready", flush=True)
        while not os.path.exists(sys.argv[1] + "-go"):
            pass
        for number in range(40):
            with store.artifacts.publish("tokens", f"k{number}", {"by": os.getpid()}) as folder:
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
        artifact = store.artifacts.expect("tokens", f"k{number}")
        assert store.artifacts.find("tokens", f"k{number}") == artifact
        whole = str(artifact.summary["by"]).encode() * 5000
        assert {(store.artifacts.path(artifact) / name).read_bytes() for name in "abc"} == {whole}
    assert not [name for name in everything_in(store) if name.startswith("staging")]


def test_a_process_killed_before_its_manifest_leaves_nothing_that_counts(store, caplog):
    code = """
        with store.artifacts.publish("tokens", "k1") as folder:
            (folder / "model.bin").write_bytes(b"x" * 10000)
            print("written", flush=True)
            time.sleep(60)
        """
    writer = start(store, code)
    assert writer.stdout.readline() == "written\n"
    assert store.artifacts.find("tokens", "k1") is None
    publish(store, key="k2")  # while the other one lives, its work stays
    assert any("model.bin" in name for name in everything_in(store) if name.startswith("staging"))
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    assert store.artifacts.find("tokens", "k1") is None
    with caplog.at_level(logging.INFO):
        publish(store)
    assert "interrupted process" in caplog.text
    assert not [name for name in everything_in(store) if name.startswith("staging")]


def test_a_process_killed_between_manifest_and_move_leaves_nothing_that_counts(store):
    code = """
        from tasks.store.artifacts import ArtifactStore
        ArtifactStore._move_into_place = lambda *arguments: os.kill(os.getpid(), 9)
        with store.artifacts.publish("tokens", "k1") as folder:
            (folder / "model.bin").write_bytes(b"x")
        """
    assert start(store, code).wait(60) == -signal.SIGKILL
    assert any("manifest.json" in name for name in everything_in(store))
    assert store.artifacts.find("tokens", "k1") is None
    assert publish(store)


def test_a_store_can_be_moved(store, tmp_path):
    made = publish(store)
    Path(store.uri).rename(tmp_path / "elsewhere")
    found = Store(str(tmp_path / "elsewhere")).artifacts.find("tokens", "k1")
    assert (found.key, found.summary) == (made.key, made.summary)
    with pytest.raises(FileNotFoundError, match="tokens k1 is not in the store"):
        store.artifacts.path(made)


def test_a_large_artifact_is_verified_in_seconds(store):
    limit = 5000
    made = publish(store)
    flip(store.artifacts.path(made) / "model.bin")  # 7000 bytes: beyond what is hashed
    assert store.artifacts.find("tokens", "k1", limit) == made
    os.truncate(store.artifacts.path(made) / "model.bin", 6999)
    assert store.artifacts.find("tokens", "k1", limit) is None


def test_a_run_of_the_same_identity_is_gone_on_with(store):
    folder = store.run_folder("tiny").prepare("one")
    (folder / "metrics.jsonl").write_text("{}")
    assert store.run_folder("tiny").prepare("one") == folder == store.run_folder("tiny").path
    assert (folder / "metrics.jsonl").exists()


def test_a_run_of_another_identity_is_moved_aside_and_never_overwritten(store, caplog):
    for number, identity in enumerate(("one", "two", "three")):
        (store.run_folder("tiny").prepare(identity) / "metrics.jsonl").write_text(identity)
        assert len(caplog.messages) == number
    runs = store.run_folder("tiny").path.parent
    contents = {path.name: (path / "metrics.jsonl").read_text() for path in runs.iterdir()}
    assert contents == {"tiny~1": "one", "tiny~2": "two", "tiny": "three"}
    assert "run tiny" in caplog.messages[-1]
    assert "tiny~2" in caplog.messages[-1]


def test_a_folder_that_was_nobodys_run_is_moved_aside_too(store):
    folder = store.run_folder("tiny").path
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    store.run_folder("tiny").prepare("one")
    assert (folder.with_name("tiny~1") / "notes.txt").read_text() == "mine"


@pytest.fixture(params=["memory", "s3"])
def remote(request, monkeypatch, tmp_path):
    """Makes stores of one place, each with a machine's own local folder."""
    if request.param == "memory":
        import fsspec

        fsspec.filesystem("memory").store.clear()
        yield lambda machine: Store("memory://bucket/store", tmp_path / machine)
        return
    with s3.bucket(monkeypatch) as address:
        yield lambda machine: Store(f"{address}/store", tmp_path / machine)


def test_on_a_remote_store_artifacts_go_from_one_machine_to_another(remote):
    here, there = remote("here"), remote("there")
    with here.artifacts.lock("tokens", "k1"):
        shard = publish(here)
    requires = [{"kind": "tokens", "key": "k1"}]
    corpus = publish(here, "dataset", "d1", {"corpus.json": b"{}"}, requires=requires)
    assert there.artifacts.find("dataset", "d1") == corpus
    folder = there.artifacts.path(corpus)
    assert (folder / "corpus.json").read_bytes() == b"{}"
    assert (folder.parent.parent / "tokens/k1/deep/er/tokens.idx").read_bytes() == FILES["deep/er/tokens.idx"]
    flip(there.artifacts.path(shard) / "model.bin")  # the local copy, which is then fetched again
    assert (there.artifacts.path(shard) / "model.bin").read_bytes() == FILES["model.bin"]


def test_a_run_that_another_machine_made_anew_is_brought_from_there(remote):
    here, there = remote("here"), remote("there")
    for machine, identity in ((here, "one"), (there, "two")):
        (machine.run_folder("tiny").prepare(identity) / "metrics.jsonl").write_text(identity)
        machine.run_folder("tiny").sync().upload()
    folder = here.run_folder("tiny").prepare("two")
    assert (folder / "metrics.jsonl").read_text() == "two"
    assert (folder.with_name("tiny~1") / "metrics.jsonl").read_text() == "one"


def test_a_remote_artifact_without_a_manifest_is_none(remote):
    here, there = remote("here"), remote("there")
    publish(here)
    here.backend.remove("artifacts/tokens/k1/manifest.json")  # as where an upload was interrupted
    assert there.artifacts.find("tokens", "k1") is None
    assert publish(there) == there.artifacts.find("tokens", "k1") == here.artifacts.find("tokens", "k1")


def test_a_remote_artifact_that_was_damaged_is_never_handed_out(remote):
    here, there = remote("here"), remote("there")
    made = publish(here)
    here.backend.write("artifacts/tokens/k1/model.bin", b"Weights" * 1000)
    with pytest.raises(Corrupted, match=r"model\.bin"):
        there.artifacts.path(made)
    here.backend.write("artifacts/tokens/k1/model.bin", b"short")
    assert there.artifacts.find("tokens", "k1") is None
    assert publish(there)


def test_a_large_store_is_listed_in_time(store):
    for number in range(200):
        with store.artifacts.publish("tokens", f"k{number}") as folder:
            (folder / "file").write_bytes(b"x")
    requires = [{"kind": "tokens", "key": f"k{number}"} for number in range(200)]
    publish(store, "dataset", "d1", {}, requires=requires)
    begun = time.perf_counter()
    assert store.artifacts.find("dataset", "d1")
    assert time.perf_counter() - begun < 5
