"""Where a store's bytes lie, behind one seam: a folder, or anything that fsspec reaches (`s3://`).

Names are relative to the root, with slashes. Creating is exclusive everywhere (O_EXCL on a folder, a conditional write
on S3), which is all that locks are built on.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol
from uuid import uuid4

from profiles.errors import ProfileError

AT_ONCE = 8  # files of a remote store that are on their way


class Storage(Protocol):
    """Small files by name, and folders to be listed and removed."""

    def location(self, name: str) -> str:
        """The path or URI that a name stands for."""

    def read(self, name: str) -> bytes | None:
        """A file's contents; None where there is none."""

    def write(self, name: str, data: bytes) -> None:
        """Write a file, over an older one; readers see the one or the other."""

    def create(self, name: str, data: bytes) -> bool:
        """Write a file unless there is one; whether this call did. No two calls give the same data."""

    def files(self, name: str) -> dict[str, int]:
        """Every file below a folder, by its path from there, with its size in bytes."""

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with all that is in it, if it is there."""


class Folder:
    """A folder on this machine, or one that machines share."""

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
        found = {}
        for folder, _, names in os.walk(root):
            for file in names:
                path = Path(folder, file)
                with contextlib.suppress(FileNotFoundError):  # removed since it was listed
                    found[path.relative_to(root).as_posix()] = path.stat().st_size
        return found

    def remove(self, name: str) -> None:
        path = self.path(name)
        if path.is_dir():
            # Out of sight at once, so that nobody sees half of it; then away.
            aside = self.root / "staging" / f"removed-{uuid4().hex}"
            aside.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                path.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


class Objects:
    """A prefix of an object store."""

    def __init__(self, uri: str) -> None:
        from fsspec.core import url_to_fs

        try:
            # Another process's writes are to be seen, so listings are not cached.
            self._filesystem, self._root = url_to_fs(uri.rstrip("/"), use_listings_cache=False)
        except (ValueError, ImportError) as error:  # a scheme that nobody knows, or whose package is not here
            raise ProfileError("store", uri, str(error)) from error
        self._uri = uri.rstrip("/")

    def location(self, name: str) -> str:
        return f"{self._uri}/{name}"

    def read(self, name: str) -> bytes | None:
        with self._asked(name), contextlib.suppress(FileNotFoundError):
            return self._filesystem.cat_file(self._path(name))
        return None

    def write(self, name: str, data: bytes) -> None:
        with self._asked(name):
            self._filesystem.pipe_file(self._path(name), data)

    def create(self, name: str, data: bytes) -> bool:
        try:
            with self._asked(name):
                self._filesystem.pipe_file(self._path(name), data, mode="create")
        except OSError:  # as which the refusal comes depends on the file system
            found = self.read(name)
            if found is None:
                raise
            return found == data  # ours after all, where only the answer to the first try was lost
        return True

    def files(self, name: str) -> dict[str, int]:
        root = self._path(name)
        with self._asked(name):
            found = self._filesystem.find(root, detail=True)
        return {path.removeprefix(root).lstrip("/"): info["size"] for path, info in found.items()}

    def remove(self, name: str) -> None:
        with self._asked(name), contextlib.suppress(FileNotFoundError):
            self._filesystem.rm(self._path(name), recursive=True)

    def move(self, name: str, to: str) -> None:
        """Give a folder another name."""
        found = [f"{self._path(name)}/{file}" for file in self.files(name)]
        targets = [self._path(to) + path.removeprefix(self._path(name)) for path in found]
        with self._asked(name):
            self._filesystem.copy(found, targets)
            self._filesystem.rm(found)

    def upload(self, folder: Path, names: list[str], to: str) -> None:
        """Copy these files of a folder to below a name, several at a time, large ones in parts."""
        targets = [f"{self._path(to)}/{name}" for name in names]
        with self._asked(to):
            self._filesystem.put([str(folder / name) for name in names], targets)

    def download(
        self, name: str, names: Sequence[str], to: Path, then: Callable[[str], None] = lambda file: None
    ) -> None:
        """Copy these files from below a name into a folder, several at a time, large ones in parts.

        Args:
            then: called with each that is here, while others are still coming.
        """

        def fetch(file: str) -> None:
            (to / file).parent.mkdir(parents=True, exist_ok=True)
            with self._asked(f"{name}/{file}"):
                self._filesystem.get_file(self._path(f"{name}/{file}"), str(to / file))
            then(file)

        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(fetch, names))

    @contextlib.contextmanager
    def _asked(self, name: str) -> Iterator[None]:
        """Its clients try again for a while; what they give up with are errors of their own kinds, here an OSError."""
        try:
            yield
        except OSError:
            raise
        except Exception as error:
            raise OSError(f"{self.location(name)}: {error}") from error

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"
