"""Shards of a remote corpus in a local folder of limited size, copied there ahead of their use.

    <shard>.bin, .idx    under their names once they are whole
    <shard>.room         as large as both together, all of it a hole: what the shard counts for, from before it is copied
    <shard>.lock         shared by those who read the shard, had alone by who copies or removes it

The folder is shared by the processes of a node. Where room is needed the shards that were asked for longest ago go, but none that
is being read: a file that is mapped keeps its disk, whatever its name. So readers let go of a shard after each look at it.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import logging
import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path

log = logging.getLogger("trainshed")

ENDINGS = (".bin", ".idx")
COPIES = 4  # that are made ahead at a time
POLL = 0.01  # seconds between looks for room, where all there is is being read or copied


class Stage:
    """A local cache of `.bin`/`.idx` pairs.

    Args:
        folder: on this machine.
        limit: bytes that it may hold.
        root: URI that relative paths of shards start from; empty where those are on this machine.

    Attributes:
        anonymous: shards that are read without credentials.
    """

    def __init__(self, folder: Path, limit: int, root: str = "") -> None:
        self.anonymous: set[str] = set()
        self._folder, self._limit, self._root = folder, limit, root
        self._pool = ThreadPoolExecutor(COPIES, thread_name_prefix="stage")
        self._coming: dict[str, Future[None]] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def has(self, path: str) -> bool:
        """Whether a shard is to be copied; others are on this machine."""
        return "://" in path or (bool(self._root) and not path.startswith("/"))

    @contextmanager
    def held(self, path: str) -> Iterator[Path]:
        """A shard's prefix on this machine, where both its files are and stay for the block; map them no longer than that.

        Raises:
            OSError: it cannot be fetched. ValueError: it alone is larger than the limit.
        """
        coming = self._coming.pop(path, None)
        if coming is not None and not coming.cancel():  # one that has not begun need not wait for its turn
            wait([coming])  # what it may have failed of is tried once more
        uri, prefix = self._places(path)
        while True:
            with _locked(_lock(prefix), fcntl.LOCK_SH):
                if _whole(prefix):
                    os.utime(_room(prefix))  # asked for just now
                    yield prefix
                    return
            self._fetch(uri, prefix)

    def ahead(self, paths: Iterable[str]) -> None:
        """Begin to copy these shards, in about this order, in the background."""
        for path in paths:
            if path not in self._coming:
                self._coming[path] = self._pool.submit(self._fetch, *self._places(path))

    def _places(self, path: str) -> tuple[str, Path]:
        """A shard's URI, and its prefix here."""
        uri = path if "://" in path else f"{self._root}/{path}"
        return uri, self._folder / hashlib.sha256(uri.encode()).hexdigest()[:32]

    def _fetch(self, uri: str, prefix: Path) -> None:
        with _locked(_lock(prefix)):
            if _whole(prefix):
                os.utime(_room(prefix))
            else:
                self._copy(uri, prefix)

    def _copy(self, uri: str, prefix: Path) -> None:
        from fsspec.core import url_to_fs

        there, inner = url_to_fs(uri, **({"anon": True} if uri in self.anonymous else {}))
        size = sum(there.info(f"{inner}{ending}")["size"] for ending in ENDINGS)
        if size > self._limit:
            raise ValueError(f"{uri} has {size:,} bytes, data.cache_gigabytes allows {self._limit:,}")
        _remove(
            prefix
        )  # what a process that was killed may have left; nobody's room is kept while one waits for room
        with _locked(self._folder / "room.lock"):  # one at a time, or the room would not be known
            while not self._make_room(size):
                time.sleep(POLL)
            with _room(prefix).open("wb") as room:
                room.truncate(size)
        for ending in ENDINGS:
            partial = prefix.with_suffix(f"{ending}.partial")
            there.get_file(f"{inner}{ending}", str(partial))
            partial.replace(prefix.with_suffix(ending))

    def _make_room(self, wanted: int) -> bool:
        """Remove what was asked for longest ago until so many bytes fit; whether they do."""
        states: dict[Path, os.stat_result] = {}
        for room in self._folder.glob("*.room"):
            with suppress(FileNotFoundError):
                states[room.with_suffix("")] = room.stat()
        size = sum(state.st_size for state in states.values())
        for prefix in sorted(states, key=lambda prefix: states[prefix].st_mtime_ns):
            if size + wanted <= self._limit:
                break
            with suppress(BlockingIOError), _locked(_lock(prefix), fcntl.LOCK_EX | fcntl.LOCK_NB):
                _remove(prefix)
                size -= states[prefix].st_size
        return size + wanted <= self._limit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What a program that reads a corpus is told of data that is elsewhere."""
    parser.add_argument("--artifacts", default="", help="URI of the store's artifacts, if it is not a folder")
    parser.add_argument("--cache", type=Path, help="folder that shards from elsewhere are copied to")


def of(options: argparse.Namespace, gigabytes: float) -> Stage | None:
    """The stage that the arguments ask for."""
    return Stage(options.cache, int(gigabytes * 1e9), options.artifacts) if options.cache else None


def _lock(prefix: Path) -> Path:
    return prefix.with_suffix(".lock")


def _room(prefix: Path) -> Path:
    return prefix.with_suffix(".room")


def _whole(prefix: Path) -> bool:
    return all(prefix.with_suffix(ending).exists() for ending in (*ENDINGS, ".room"))


def _remove(prefix: Path) -> None:
    """A shard's files, the note of its room last."""
    for ending in ENDINGS:
        for file in prefix.with_suffix(ending), prefix.with_suffix(f"{ending}.partial"):
            file.unlink(missing_ok=True)
    _room(prefix).unlink(missing_ok=True)


@contextmanager
def _locked(path: Path, how: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Raises BlockingIOError where it shall not wait and would have to."""
    with path.open("a") as file:
        fcntl.flock(file, how)  # the system lets go of it where the process ends
        yield
