"""A corpus elsewhere: its shards come to a folder of limited size before they are read."""

import contextlib
import json

import fsspec
import numpy as np
import pytest

from modeling.data import Corpus, Samples
from modeling.stage import Stage
from tests.modeling.test_data import make


@pytest.fixture
def remote(tmp_path):
    """A dataset's folder without its shards, which lie in memory, each of 200 bytes of tokens and an index."""
    folder = make(tmp_path, np.arange(1001), range(100, 1001, 100), document=100, span=200)
    there = fsspec.filesystem("memory")
    there.rm("/artifacts", recursive=True) if there.exists("/artifacts") else None
    there.put(str(tmp_path / "artifacts/tokens"), "/artifacts/tokens", recursive=True)
    for path in (tmp_path / "artifacts/tokens").rglob("train.*"):
        path.unlink()
    return folder


def size(folder):
    """Bytes of the shards in it; what the stage copies or removes meanwhile comes and goes."""
    total = 0
    for path in folder.iterdir():
        if path.suffix != ".lock":
            with contextlib.suppress(FileNotFoundError):
                total += path.stat().st_size
    return total


def test_an_epoch_is_read_through_a_cache_that_holds_part_of_it(remote, tmp_path, monkeypatch):
    fetched = []
    copy = Stage._copy
    monkeypatch.setattr(
        Stage, "_copy", lambda self, uri, files: (fetched.append(uri), copy(self, uri, files))
    )
    stage = Stage(tmp_path / "cache", 2000, "memory://artifacts")
    samples = Samples(Corpus.open(remote, "train", stage), 10, seed=5)
    rows = []
    for first in range(0, 100, 4):
        rows += samples.batch(first, 4)[:, 0].tolist()
        assert size(tmp_path / "cache") <= 2000
    assert sorted(rows) == list(range(0, 1000, 10))
    assert len(set(fetched)) == 11
    assert len(fetched) < 25  # most are fetched once, in spite of the room for half of them


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
