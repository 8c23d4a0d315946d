"""A corpus elsewhere: its shards come to a folder of limited size before they are read."""

import contextlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import numpy as np
import pytest

from modeling.data.corpus import Corpus, Samples
from modeling.data.shard_cache import Stage
from tests.modeling.test_data import make


def upload(store):
    """Its shards to memory://artifacts, where nothing else is then."""
    there = fsspec.filesystem("memory")
    there.rm("/artifacts", recursive=True) if there.exists("/artifacts") else None
    there.put(str(store / "artifacts/tokens"), "/artifacts/tokens", recursive=True)


@pytest.fixture
def remote(tmp_path):
    """A dataset's folder without its shards, which lie in memory, each of 200 bytes of tokens and an index."""
    folder = make(tmp_path, np.arange(1001), range(100, 1001, 100), document=100, span=200)
    upload(tmp_path)
    for path in (tmp_path / "artifacts/tokens").rglob("train.*"):
        path.unlink()
    return folder


def held(folder):
    """Bytes of the shards in it, once it is sure that no file is mapped which has no name any more but keeps its disk."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert not [line for line in maps if str(folder) in line and line.endswith("(deleted)")]
    total = 0
    for path in folder.iterdir():
        with contextlib.suppress(
            FileNotFoundError
        ):  # what the stage copies or removes meanwhile comes and goes
            total += path.stat().st_size if path.suffix not in (".lock", ".room") else 0
    return total


@pytest.fixture
def fetched(monkeypatch):
    """The shards that are copied, in their order."""
    uris = []
    copy = Stage._copy
    monkeypatch.setattr(Stage, "_copy", lambda self, uri, prefix: (uris.append(uri), copy(self, uri, prefix)))
    return uris


def test_an_epoch_is_read_through_a_cache_that_holds_part_of_it(remote, tmp_path, fetched):
    stage = Stage(tmp_path / "cache", 2000, "memory://artifacts")
    samples = Samples(Corpus.open(remote, "train", stage), 10, seed=5)
    rows = []
    for first in range(0, 100, 4):
        rows += samples.batch(first, 4)[:, 0].tolist()
        assert held(tmp_path / "cache") <= 2000
    assert sorted(rows) == list(range(0, 1000, 10))
    assert len(set(fetched)) == 11
    assert len(fetched) < 25  # most are fetched once, in spite of the room for half of them


def test_documents_are_told_after_their_shards_have_made_room_for_others(remote, tmp_path):
    stage = Stage(tmp_path / "cache", 1000, "memory://artifacts")
    staged = Samples(Corpus.open(remote, "train", stage), 30, seed=5)
    here = tmp_path / "here"
    here.mkdir()
    whole = make(here, np.arange(1001), range(100, 1001, 100), document=100, span=200)
    local = Samples(Corpus.open(whole, "train"), 30, seed=5)
    for first in range(0, 60, 4):
        assert np.array_equal(staged.batch(first, 4), local.batch(first, 4))
        assert np.array_equal(staged.documents(first, 4), local.documents(first, 4))
        assert held(tmp_path / "cache") <= 1000


def test_a_shard_that_is_being_read_makes_no_room_for_another_process(remote, tmp_path):
    here, there = (Stage(tmp_path / "cache", 600, "memory://artifacts") for _ in range(2))
    with ThreadPoolExecutor() as pool:
        with here.held("tokens/key0/train") as prefix:
            before = prefix.with_suffix(".bin").read_bytes()
            for k in range(1, 5):  # there is room for two
                with there.held(f"tokens/key{k}/train"):
                    assert held(tmp_path / "cache") <= 600
            assert prefix.with_suffix(".bin").read_bytes() == before
            with there.held("tokens/key5/train"):
                waits = pool.submit(here._fetch, *here._places("tokens/key6/train"))
                assert held(tmp_path / "cache") <= 600
                assert not waits.done()
        waits.result(30)  # once both are read there is room


def test_the_first_batch_waits_for_its_own_shards_alone(tmp_path, monkeypatch):
    folder = make(tmp_path, np.arange(3001), range(100, 3001, 100), document=100)
    upload(tmp_path)
    stage = Stage(tmp_path / "cache", 10**6, "memory://artifacts")
    samples = Samples(Corpus.open(folder, "train", stage), 10, seed=5)
    wanted = {samples.corpus.paths[int(start) // 100] for start in samples.starts(np.arange(4))}
    copy, released = Stage._copy, threading.Event()

    def slow(self, uri, prefix):
        if uri.removeprefix("memory://artifacts/") not in wanted:
            released.wait()
        copy(self, uri, prefix)

    monkeypatch.setattr(Stage, "_copy", slow)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(samples.batch, 0, 4)
        try:
            assert first.result(30).shape == (4, 11)  # while no other shard comes
        finally:
            released.set()
            stage._pool.shutdown()


def test_shards_are_there_before_they_are_asked_for(remote, tmp_path):
    stage = Stage(tmp_path / "cache", 10**6, "memory://artifacts")
    samples = Samples(Corpus.open(remote, "train", stage), 10, seed=5)
    samples.batch(0, 1)
    for coming in list(stage._coming.values()):
        coming.result()
    assert len(list((tmp_path / "cache").glob("*.bin"))) >= 4  # this span's and the next one's


def test_a_shard_larger_than_the_cache_is_refused(remote, tmp_path):
    stage = Stage(tmp_path / "cache", 100, "memory://artifacts")
    with pytest.raises(ValueError, match=r"has \d+ bytes, data\.cache_gigabytes allows 100"):
        Samples(Corpus.open(remote, "train", stage), 10, seed=5).batch(0, 1)


def test_a_shard_on_this_machine_is_not_copied(tmp_path):
    folder = make(tmp_path, np.arange(1001))
    stage = Stage(tmp_path / "cache", 10**6)
    assert Samples(Corpus.open(folder, "train", stage), 10, seed=5).batch(0, 100).shape == (100, 11)
    assert not list((tmp_path / "cache").iterdir())


def test_shards_are_read_without_credentials_where_that_is_said(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda uri, **options: asked.append(options) or 1 / 0)
    folder = make(tmp_path, np.arange(1001))
    corpus = json.loads((folder / "corpus.json").read_text())
    corpus["train"][0] |= {"path": "s3://open/pair", "anonymous": True}
    (folder / "corpus.json").write_text(json.dumps(corpus))
    stage = Stage(tmp_path / "cache", 10**6)
    with pytest.raises(ZeroDivisionError):
        Corpus.open(folder, "train", stage).read(0, 1)
    assert asked == [{"anon": True}]
