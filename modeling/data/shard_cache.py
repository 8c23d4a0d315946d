"""Shard cache: a remote corpus's shards in a local folder of limited size, prefetched before reads.

    <shard>.bin, .idx    the shard, under these names once complete; a shard of another size is downloaded again
    <shard>.room         sparse file as large as both, which reserves the shard's space before it is downloaded
    <shard>.lock         held shared by readers of the shard, exclusively while it is downloaded or evicted

The folder is shared by the processes of a node. The least recently used shards are evicted, except those being
read: a mapped file occupies disk space even when unlinked. So readers release a shard after each read.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path

from parallel.checkpoint.locations import reject_page_file
from parallel.checkpoint.object_stores import renew_credentials
from profiles.files import folders, retries, retry_policies, state_files
from profiles.files.file_locks import locked

SUFFIXES = (".bin", ".idx")
PARALLEL_DOWNLOADS = 4
PERMANENT = (FileNotFoundError, ValueError, ImportError)  # errors that are not retried
POLL = 0.01  # seconds between attempts to evict, while every shard is being read or downloaded


class ShardCache:
    """A local LRU cache of `.bin`/`.idx` pairs.

    Args:
        folder: cache folder on this machine.
        limit: its capacity in bytes.
        root: URI that relative shard paths are resolved against; empty if they are on this machine.

    Attributes:
        anonymous: shards to read without credentials.
        digests: of the contents of shards that may be replaced under the same path.

    Raises:
        ValueError: the folder is a file, or a link to nothing.
    """

    def __init__(self, folder: Path, limit: int, root: str = "") -> None:
        self.anonymous: set[str] = set()
        self.digests: dict[str, str] = {}
        self._folder, self._limit, self._root = folder, limit, root
        self._pool = ThreadPoolExecutor(PARALLEL_DOWNLOADS, thread_name_prefix="shard-cache")
        self._prefetches: dict[str, Future[None]] = {}
        try:
            state_files.make_folder(folder)
        except NotADirectoryError as error:
            raise ValueError(
                f"{error.filename}: is not a folder, or is a link to nothing; remove it, or mount what it links to"
            ) from error

    def is_remote(self, path: str) -> bool:
        """Whether a shard is read through the cache; others are on this machine."""
        return "://" in path or (bool(self._root) and not path.startswith("/"))

    @contextmanager
    def open(self, path: str) -> Iterator[Path]:
        """Yield a pinned shard's local prefix, downloaded if needed; do not map its files beyond the block.

        Raises:
            FileNotFoundError: there is no such shard.
            ConnectionError: the download failed, and all retries.
            ValueError: the shard alone is larger than the cache.
        """
        prefetch = self._prefetches.pop(path, None)
        if prefetch is not None and not prefetch.cancel():  # a shard that is still queued is fetched below
            wait([prefetch])  # if it failed, it is retried below
        uri, prefix = self._locate(path)
        while True:
            with locked(_lock_file(prefix), shared=True):
                if _is_complete(prefix):
                    os.utime(_reservation(prefix))  # marks it as used
                    yield prefix
                    return
            what = f"{uri}: cannot be downloaded"
            retries.call(lambda: self._fetch(uri, prefix), what, retry_policies.SHARD.delays, PERMANENT)

    def prefetch(self, paths: Iterable[str]) -> None:
        """Download these shards in the background, roughly in this order."""
        for path in paths:
            if path not in self._prefetches:
                self._prefetches[path] = self._pool.submit(self._fetch, *self._locate(path))

    def _locate(self, path: str) -> tuple[str, Path]:
        """A shard's URI and its local prefix."""
        uri = path if "://" in path else f"{self._root}/{path}"
        name = f"{uri}\n{self.digests[path]}" if path in self.digests else uri
        return uri, self._folder / hashlib.sha256(name.encode()).hexdigest()[:32]

    def _fetch(self, uri: str, prefix: Path) -> None:
        with locked(_lock_file(prefix)):
            if _is_complete(prefix):
                os.utime(_reservation(prefix))
            else:
                self._download(uri, prefix)

    def _download(self, uri: str, prefix: Path) -> None:
        from fsspec.core import url_to_fs

        remote, path = url_to_fs(uri, **({"anon": True} if uri in self.anonymous else {}))
        renew_credentials(remote)
        size = sum(remote.info(f"{path}{suffix}")["size"] for suffix in SUFFIXES)
        if size > self._limit:
            raise ValueError(
                f"data.cache_gigabytes: {uri} has {size:,} bytes, the cache holds {self._limit:,}; raise the limit"
            )
        _remove(prefix)  # leftovers of a killed process, which must not reserve space while this one waits
        with locked(self._folder / "room.lock"):  # one process at a time, so that the free space is known
            while not self._evict(size):
                time.sleep(POLL)
            with _reservation(prefix).open("wb") as file:
                file.truncate(size)
        for suffix in SUFFIXES:
            partial = prefix.with_suffix(f"{suffix}.partial")
            remote.get_file(f"{path}{suffix}", str(partial))
            reject_page_file(f"{uri}{suffix}", partial)
            with partial.open("rb") as file:
                os.fsync(file.fileno())  # so that a power failure leaves no empty file under the name
            partial.replace(prefix.with_suffix(suffix))
        if not _is_complete(prefix):
            raise OSError(f"{uri}: the downloaded files do not have the listed {size:,} bytes")

    def _evict(self, needed: int) -> bool:
        """Remove least recently used shards until `needed` bytes are free; returns whether they are."""
        states: dict[Path, os.stat_result] = {}
        for file in folders.matches(self._folder, "*.room"):
            with suppress(FileNotFoundError):
                states[file.with_suffix("")] = file.stat()
        used = sum(state.st_size for state in states.values())
        for prefix in sorted(states, key=lambda prefix: states[prefix].st_mtime_ns):
            if used + needed <= self._limit:
                break
            with suppress(BlockingIOError), locked(_lock_file(prefix), wait=False):
                _remove(prefix)
                used -= states[prefix].st_size
        return used + needed <= self._limit


def from_arguments(options: argparse.Namespace, gigabytes: float) -> ShardCache | None:
    """The shard cache of a job's options --artifacts and --cache; None without --cache."""
    return ShardCache(options.cache, int(gigabytes * 1e9), options.artifacts) if options.cache else None


def _lock_file(prefix: Path) -> Path:
    return prefix.with_suffix(".lock")


def _reservation(prefix: Path) -> Path:
    return prefix.with_suffix(".room")


def _is_complete(prefix: Path) -> bool:
    try:
        size = sum(prefix.with_suffix(suffix).stat().st_size for suffix in SUFFIXES)
        return size == _reservation(prefix).stat().st_size
    except FileNotFoundError:
        return False


def _remove(prefix: Path) -> None:
    """Delete a shard's files; the reservation last, when its space is free."""
    for suffix in SUFFIXES:
        for file in prefix.with_suffix(suffix), prefix.with_suffix(f"{suffix}.partial"):
            file.unlink(missing_ok=True)
    _reservation(prefix).unlink(missing_ok=True)
