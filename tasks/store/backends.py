"""Storage backends of a store: a local or shared folder, or any fsspec file system (`s3://`).

Names are relative to the store's root, separated by slashes. `create` is exclusive on every backend (O_EXCL on a folder, a
conditional write on S3); locks need nothing else.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol
from uuid import uuid4

from profiles.errors import ProfileError

PARALLEL_DOWNLOADS = 8
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def checked_name(name: str) -> str:
    """The name, if it is valid as one component of a path in a store. Raises ValueError."""
    if not NAME.fullmatch(name):
        raise ValueError(f"{name!r}: invalid name in a store; use letters, digits, '.', '_' and '-'")
    return name


class Backend(Protocol):
    """Reads and writes small files by name; lists and removes folders."""

    def location(self, name: str) -> str:
        """Path or URI of a name."""

    def read(self, name: str) -> bytes | None:
        """Contents of a file; None if it does not exist."""

    def write(self, name: str, data: bytes) -> None:
        """Write a file atomically, replacing an existing one."""

    def create(self, name: str, data: bytes) -> bool:
        """Write a file only if it does not exist; returns whether this call created it.

        Callers must pass unique data: a lost response is resolved by comparing contents.
        """

    def files(self, name: str) -> dict[str, int]:
        """Sizes in bytes of all files below a folder, by their paths relative to it."""

    def remove(self, name: str) -> None:
        """Remove a file, or a folder recursively; no error if it does not exist."""


class FolderBackend:
    """A folder on this machine or on a shared file system."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, name: str) -> Path:
        return self.root / name

    def location(self, name: str) -> str:
        return str(self.path(name))

    def read(self, name: str) -> bytes | None:
        try:
            return self.path(name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def write(self, name: str, data: bytes) -> None:
        path = self.path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{uuid4().hex}")
        partial.write_bytes(data)
        partial.replace(path)

    def create(self, name: str, data: bytes) -> bool:
        path = self.path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with path.open("xb") as file:
                file.write(data)
        except FileExistsError:
            return False
        return True

    def files(self, name: str) -> dict[str, int]:
        root = self.path(name)
        sizes = {}
        for folder, _, names in os.walk(root):
            for file in names:
                path = Path(folder, file)
                with contextlib.suppress(FileNotFoundError):  # removed since os.walk listed it
                    sizes[path.relative_to(root).as_posix()] = path.stat().st_size
        return sizes

    def remove(self, name: str) -> None:
        path = self.path(name)
        if path.is_dir():
            # Renamed first, so that no reader sees a partially removed folder.
            removed = self.root / "staging" / f"removed-{uuid4().hex}"
            removed.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                path.rename(removed)
            shutil.rmtree(removed, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


class ObjectBackend:
    """A prefix of an object store, accessed through fsspec. Raises ProfileError for an unknown scheme."""

    def __init__(self, uri: str) -> None:
        from fsspec.core import url_to_fs

        try:
            # Listings are not cached: other processes write to the same prefix.
            self._filesystem, self._root = url_to_fs(uri.rstrip("/"), use_listings_cache=False)
        except (ValueError, ImportError) as error:
            raise ProfileError("store", uri, str(error)) from error
        self._uri = uri.rstrip("/")

    def location(self, name: str) -> str:
        return f"{self._uri}/{name}"

    def read(self, name: str) -> bytes | None:
        with self._os_errors(name), contextlib.suppress(FileNotFoundError):
            return self._filesystem.cat_file(self._path(name))
        return None

    def write(self, name: str, data: bytes) -> None:
        with self._os_errors(name):
            self._filesystem.pipe_file(self._path(name), data)

    def create(self, name: str, data: bytes) -> bool:
        try:
            with self._os_errors(name):
                self._filesystem.pipe_file(self._path(name), data, mode="create")
        except OSError:  # "already exists" is a different exception in each file system
            existing = self.read(name)
            if existing is None:
                raise
            return existing == data  # equal if the first attempt succeeded and only its response was lost
        return True

    def files(self, name: str) -> dict[str, int]:
        root = self._path(name)
        with self._os_errors(name):
            found = self._filesystem.find(root, detail=True)
        return {path.removeprefix(root).lstrip("/"): info["size"] for path, info in found.items()}

    def remove(self, name: str) -> None:
        with self._os_errors(name), contextlib.suppress(FileNotFoundError):
            self._filesystem.rm(self._path(name), recursive=True)

    def copy(self, name: str, target: str, last: str | None = None) -> None:
        """Copy a folder; the file `last` after all others."""
        names = sorted(self.files(name), key=lambda file: file == last)
        first = names[:-1] if last in names else names
        for group in (first, names[len(first) :]):
            if group:
                sources, targets = (
                    [self._path(f"{folder}/{file}") for file in group] for folder in (name, target)
                )
                with self._os_errors(name):
                    self._filesystem.copy(sources, targets)

    def move(self, name: str, target: str) -> None:
        """Rename a folder (copy and delete)."""
        names = list(self.files(name))
        self.copy(name, target)
        with self._os_errors(name):
            self._filesystem.rm([self._path(f"{name}/{file}") for file in names])

    def upload(self, folder: Path, names: list[str], target: str) -> None:
        """Upload files of a folder to below a name, concurrently; large files in parts."""
        targets = [f"{self._path(target)}/{name}" for name in names]
        with self._os_errors(target):
            self._filesystem.put([str(folder / name) for name in names], targets)

    def download(
        self, name: str, names: Sequence[str], folder: Path, on_file: Callable[[str], None] = lambda _: None
    ) -> None:
        """Download files from below a name into a folder, concurrently; `on_file` is called with the name of each."""

        def fetch(file: str) -> None:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            with self._os_errors(f"{name}/{file}"):
                self._filesystem.get_file(self._path(f"{name}/{file}"), str(folder / file))
            on_file(file)

        with ThreadPoolExecutor(PARALLEL_DOWNLOADS) as pool:
            list(pool.map(fetch, names))

    @contextlib.contextmanager
    def _os_errors(self, name: str) -> Iterator[None]:
        """Convert the client's own exceptions, raised after its retries, into OSError."""
        try:
            yield
        except OSError:
            raise
        except Exception as error:
            raise OSError(f"{self.location(name)}: {error}") from error

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"
