"""Shards of a remote corpus in a local folder of limited size, copied there ahead of their use.

The folder is shared by the processes of a node: a lock file a shard lets one of them copy it, and a file appears under its name
whole. Where room is needed the shards that were asked for longest ago go; a process that has one mapped keeps what it has.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import logging
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

log = logging.getLogger("trainshed")

ENDINGS = (".bin", ".idx")


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
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="stage")
        self._coming: dict[str, Future[Path]] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def has(self, path: str) -> bool:
        """Whether a shard is to be copied; others are on this machine."""
        return "://" in path or (bool(self._root) and not path.startswith("/"))

    def local(self, path: str) -> Path:
        """A shard's prefix on this machine, once both its files are there.

        Raises:
            OSError: it cannot be fetched. ValueError: it alone is larger than the limit.
        """
        coming = self._coming.pop(path, None)
        if coming is not None:
            coming.result()
        return self._fetch(path)

    def ahead(self, paths: Iterable[str]) -> None:
        """Begin to copy these shards, in this order, in the background."""
        for path in paths:
            if path not in self._coming:
                self._coming[path] = self._pool.submit(self._fetch, path)

    def _fetch(self, path: str) -> Path:
        uri = path if "://" in path else f"{self._root}/{path}"
        prefix = self._folder / hashlib.sha256(uri.encode()).hexdigest()[:32]
        files = [Path(f"{prefix}{ending}") for ending in ENDINGS]
        with _locked(Path(f"{prefix}.lock")):
            if not all(file.exists() for file in files):
                self._copy(uri, files)
            for file in files:
                os.utime(file)  # asked for just now
        return prefix

    def _copy(self, uri: str, files: list[Path]) -> None:
        from fsspec.core import url_to_fs

        there, inner = url_to_fs(uri, **({"anon": True} if uri in self.anonymous else {}))
        sizes = [there.info(f"{inner}{ending}")["size"] for ending in ENDINGS]
        if sum(sizes) > self._limit:
            raise ValueError(f"{uri} has {sum(sizes):,} bytes, data.cache_gigabytes allows {self._limit:,}")
        with _locked(self._folder / "room.lock"):  # one copy at a time, or the room would not be known
            self._make_room(sum(sizes))
            for ending, file in zip(ENDINGS, files, strict=True):
                partial = file.with_suffix(f"{ending}.partial")
                there.get_file(f"{inner}{ending}", str(partial))
                partial.replace(file)

    def _make_room(self, wanted: int) -> None:
        """Remove what was asked for longest ago until so many bytes fit."""
        held: list[tuple[float, int, Path]] = []
        for file in self._folder.iterdir():
            if file.suffix != ".lock":
                state: Any = file.stat()
                held.append((state.st_mtime, state.st_size, file))
        size = sum(each[1] for each in held)
        for _, own, file in sorted(held):
            if size + wanted <= self._limit:
                return
            file.unlink(missing_ok=True)
            size -= own


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What a program that reads a corpus is told of data that is elsewhere."""
    parser.add_argument("--artifacts", default="", help="URI of the store's artifacts, if it is not a folder")
    parser.add_argument("--cache", type=Path, help="folder that shards from elsewhere are copied to")


def of(options: argparse.Namespace, gigabytes: float) -> Stage | None:
    """The stage that the arguments ask for."""
    return Stage(options.cache, int(gigabytes * 1e9), options.artifacts) if options.cache else None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the system lets go of it where the process ends
        yield
