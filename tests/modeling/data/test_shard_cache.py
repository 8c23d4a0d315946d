"""Shard cache: capacity, eviction, pinning of shards being read, prefetching and credentials."""

import contextlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import numpy as np
import pytest

from modeling.data.corpus import Corpus, Samples
from modeling.data.replay import HistoryStream, plan
from modeling.data.shard_cache import ShardCache
from profiles.files import exit_codes
from tests.modeling.data.datasets import write_dataset


def upload(store):
    """Replace the contents of memory://artifacts by the store's shards."""
    remote = fsspec.filesystem("memory")
    remote.rm("/artifacts", recursive=True) if remote.exists("/artifacts") else None
    remote.put(f"{store}/artifacts/tokens/", "/artifacts/tokens/", recursive=True)


@pytest.fixture
def remote(tmp_path):
    """A dataset artifact whose shards are in memory://, each of 200 bytes of tokens and an index."""
    folder = write_dataset(tmp_path, np.arange(1001), range(100, 1001, 100), document=100, span=200)
    upload(tmp_path)
    for path in (tmp_path / "artifacts/tokens").rglob("train.*"):
        path.unlink()
    return folder


def cached_bytes(folder):
    """Bytes of cached shards; fails if a deleted file is still mapped and so keeps its disk space."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert not [line for line in maps if str(folder) in line and line.endswith("(deleted)")]
    total = 0
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # files come and go while the cache works
            total += path.stat().st_size if path.suffix not in (".lock", ".room") else 0
    return total


@pytest.fixture
def downloads(monkeypatch):
    """URIs of the downloaded shards, in order."""
    uris = []
    download = ShardCache._download
    monkeypatch.setattr(
        ShardCache, "_download", lambda self, uri, prefix: (uris.append(uri), download(self, uri, prefix))
    )
    return uris


def test_epoch_is_read_through_a_cache_smaller_than_the_corpus(remote, tmp_path, downloads):
    cache = ShardCache(tmp_path / "cache", 2000, "memory://artifacts")
    samples = Samples(Corpus.open(remote, "train", cache), 10, seed=5)
    rows = []
    for first in range(0, 100, 4):
        rows += samples.batch(first, 4)[:, 0].tolist()
        assert cached_bytes(tmp_path / "cache") <= 2000
    assert sorted(rows) == list(range(0, 1000, 10))
    assert len(set(downloads)) == 11
    assert len(downloads) < 25  # most once, though the cache holds only half of them


def test_document_starts_are_read_after_their_shards_were_evicted(remote, tmp_path):
    cache = ShardCache(tmp_path / "cache", 1000, "memory://artifacts")
    remote_samples = Samples(Corpus.open(remote, "train", cache), 30, seed=5)
    here = tmp_path / "here"
    here.mkdir()
    local_folder = write_dataset(here, np.arange(1001), range(100, 1001, 100), document=100, span=200)
    local = Samples(Corpus.open(local_folder, "train"), 30, seed=5)
    for first in range(0, 60, 4):
        assert np.array_equal(remote_samples.batch(first, 4), local.batch(first, 4))
        assert np.array_equal(remote_samples.document_starts(first, 4), local.document_starts(first, 4))
        assert cached_bytes(tmp_path / "cache") <= 1000


def test_shard_being_read_is_not_evicted_by_another_process(remote, tmp_path):
    first, second = (ShardCache(tmp_path / "cache", 600, "memory://artifacts") for _ in range(2))
    with ThreadPoolExecutor() as pool:
        with first.open("tokens/key0/train") as prefix:
            before = prefix.with_suffix(".bin").read_bytes()
            for k in range(1, 5):  # the cache holds two
                with second.open(f"tokens/key{k}/train"):
                    assert cached_bytes(tmp_path / "cache") <= 600
            assert prefix.with_suffix(".bin").read_bytes() == before
            with second.open("tokens/key5/train"):
                blocked = pool.submit(first._fetch, *first._locate("tokens/key6/train"))
                assert cached_bytes(tmp_path / "cache") <= 600
                assert not blocked.done()
        blocked.result(30)  # succeeds once both are released


def test_first_batch_waits_only_for_its_own_shards(tmp_path, monkeypatch):
    folder = write_dataset(tmp_path, np.arange(3001), range(100, 3001, 100), document=100)
    upload(tmp_path)
    cache = ShardCache(tmp_path / "cache", 10**6, "memory://artifacts")
    samples = Samples(Corpus.open(folder, "train", cache), 10, seed=5)
    wanted = {samples.corpus.paths[int(start) // 100] for start in samples.window_starts(np.arange(4))}
    download, released = ShardCache._download, threading.Event()

    def slow(self, uri, prefix):
        if uri.removeprefix("memory://artifacts/") not in wanted:
            released.wait()
        download(self, uri, prefix)

    monkeypatch.setattr(ShardCache, "_download", slow)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(samples.batch, 0, 4)
        try:
            assert first.result(30).shape == (4, 11)  # while every other download is blocked
        finally:
            released.set()
            cache._pool.shutdown()


def test_shards_are_prefetched(remote, tmp_path):
    cache = ShardCache(tmp_path / "cache", 10**6, "memory://artifacts")
    samples = Samples(Corpus.open(remote, "train", cache), 10, seed=5)
    samples.batch(0, 1)
    for prefetch in list(cache._prefetches.values()):
        prefetch.result()
    assert len(list((tmp_path / "cache").glob("*.bin"))) >= 4  # this span's and the next one's


def test_evaluation_fetches_only_the_shards_of_its_next_batches(remote, tmp_path, downloads):
    cache = ShardCache(tmp_path / "cache", 10**6, "memory://artifacts")
    samples = Samples(Corpus.open(remote, "train", cache), 10, seed=None)
    for part, count in (samples, 1), (samples.shuffled(5), 5):
        part.batch(0, count)
        for prefetch in list(cache._prefetches.values()):
            prefetch.result()
    assert len(set(downloads)) <= 5  # of 11


def test_only_the_replayed_windows_shards_are_prefetched(remote, tmp_path, downloads):
    contents = json.loads((remote / "corpus.json").read_text())
    history = sum(shard["tokens"] for shard in contents["train"][2:])
    windows = (history - 1) // 10
    stream = HistoryStream(
        "one", "run", "", None, len(contents["train"]) - 2, history, windows, 7, 0, windows
    )
    replay = plan([1.0], [stream], 0.1, 100).to_json()
    (remote / "corpus.json").write_text(json.dumps({**contents, "format": 2, "replay": replay}))
    cache = ShardCache(tmp_path / "cache", 10**6, "memory://artifacts")
    samples = Samples(Corpus.open(remote, "train", cache), 10, seed=5)
    samples.batch(0, 1)
    for prefetch in list(cache._prefetches.values()):
        prefetch.result()
    # Of new data, and of the one window that the next batches replay; the stream's spans have four shards.
    assert len(set(downloads)) <= 2 + 2
    drawn = samples.window_starts(np.arange(8))
    assert (drawn >= sum(shard["tokens"] for shard in contents["train"][:2])).sum() == 1


def test_evaluation_on_many_ranks_prefetches_what_a_rank_reads_next(remote, tmp_path, downloads):
    """Between two reads of one rank, the others read the rest of a global batch."""
    cache = ShardCache(tmp_path / "cache", 10**6, "memory://artifacts")
    samples = Samples(Corpus.open(remote, "train", cache), 10, seed=None, global_batch=40)
    samples.batch(0, 1)
    for prefetch in list(cache._prefetches.values()):
        prefetch.result()
    before = len(downloads)
    samples.batch(samples.global_batch, 1)
    assert len(downloads) == before


def test_downloads_are_retried_through_an_outage_of_the_store(remote, tmp_path, monkeypatch, waits, caplog):
    cache, store = ShardCache(tmp_path / "cache", 10**6, "memory://artifacts"), fsspec.filesystem("memory")
    get_file, busy = type(store).get_file, OSError("503 Slow Down")

    def failing(self, path: str, *arguments) -> None:
        if path.endswith(".idx") and sum(waits) < outage:
            raise busy
        get_file(self, path, *arguments)

    monkeypatch.setattr(type(store), "get_file", failing)
    outage = 10 * 60
    cache.prefetch(["tokens/key0/train"])
    with cache.open("tokens/key0/train") as prefix:
        assert prefix.with_suffix(".idx").exists()
    assert (
        "memory://artifacts/tokens/key0/train: cannot be downloaded: 503 Slow Down; retrying" in caplog.text
    )
    outage = float("inf")
    with pytest.raises(ConnectionError, match="key1/train: cannot be downloaded: 503"):
        cache.open("tokens/key1/train").__enter__()
    waits.clear()
    with pytest.raises(FileNotFoundError, match="key99"):
        cache.open("tokens/key99/train").__enter__()
    assert not waits


def test_truncated_shard_is_downloaded_again(remote, tmp_path, waits):
    cache = ShardCache(tmp_path / "cache", 10**6, "memory://artifacts")
    with cache.open("tokens/key0/train") as prefix:
        data = prefix.with_suffix(".bin").read_bytes()
    prefix.with_suffix(".bin").write_bytes(data[:-1])
    with cache.open("tokens/key0/train"):
        assert prefix.with_suffix(".bin").read_bytes() == data
    assert not waits


def test_web_page_in_place_of_a_shard_is_an_outage(remote, tmp_path, waits):
    fsspec.filesystem("memory").pipe("/artifacts/tokens/key0/train.bin", b"<html><body>Sign in</body></html>")
    with pytest.raises(ConnectionError, match=r"key0/train\.bin: a web page"):
        ShardCache(tmp_path / "cache", 10**6, "memory://artifacts").open("tokens/key0/train").__enter__()
    assert waits


def test_cache_that_holds_no_shard_is_rejected(remote, tmp_path, caplog):
    cache = ShardCache(tmp_path / "cache", 100, "memory://artifacts")
    with pytest.raises(ValueError, match=r"data\.cache_gigabytes: .* has \d+ bytes, the cache holds 100"):
        Samples(Corpus.open(remote, "train", cache), 10, seed=5).batch(0, 1)
    link = tmp_path / "link"
    link.symlink_to("nowhere")  # such as a disk that is not mounted: a retry would fail again
    assert exit_codes.code_of(lambda: ShardCache(link, 100)) == exit_codes.REJECTED
    assert f"ValueError: {link}: is not a folder, or is a link to nothing" in caplog.text


def test_local_shard_is_not_cached(tmp_path):
    folder = write_dataset(tmp_path, np.arange(1001))
    cache = ShardCache(tmp_path / "cache", 10**6)
    assert Samples(Corpus.open(folder, "train", cache), 10, seed=5).batch(0, 100).shape == (100, 11)
    assert not list((tmp_path / "cache").iterdir())


def test_anonymous_shards_are_read_without_credentials(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda uri, **options: asked.append(options) or int("no"))
    folder = write_dataset(tmp_path, np.arange(1001))
    corpus = json.loads((folder / "corpus.json").read_text())
    corpus["train"][0] |= {"path": "s3://open/pair", "anonymous": True}
    (folder / "corpus.json").write_text(json.dumps(corpus))
    cache = ShardCache(tmp_path / "cache", 10**6)
    with pytest.raises(ValueError, match="no"):
        Corpus.open(folder, "train", cache).read(0, 1)
    assert asked == [{"anon": True}]
