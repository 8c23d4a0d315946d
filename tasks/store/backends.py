"""Storage backends of a store: a local or shared folder, or any fsspec file system (`s3://`).

Names are relative to the store's root, separated by slashes. `create` is exclusive on every backend (a hard link on a folder, a
conditional write on S3); locks need nothing else. A failed read is retried, then raised: a file is reported as absent only if
the backend says that it does not exist.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeVar
from uuid import uuid4

from parallel.checkpoint.credentials import renew_credentials
from profiles import state_files
from profiles.errors import ProfileError
from profiles.state_files import retried

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

PARALLEL_DOWNLOADS = 8
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
MODIFIED = ("LastModified", "mtime", "created", "updated")  # modification time in fsspec's listings
T = TypeVar("T")
NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}
NO_CREDENTIALS = "no S3 credentials; set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"


def checked_name(name: str) -> str:
    """The name, if it is valid as one component of a path in a store. Raises ValueError."""
    if not NAME.fullmatch(name):
        raise ValueError(f"{name!r}: invalid name in a store; use letters, digits, '.', '_' and '-'")
    return name


def checked_path(name: str) -> str:
    """The name of an untrusted listing, if its file is below the listed folder. Raises ValueError."""
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\0" in name:
        raise ValueError(f"{name!r} is not the name of a file below this folder")
    return name


@dataclass(frozen=True)
class FileInfo:
    """A file or folder in a listing."""

    size: int
    stamp: str  # differs after a change of the contents; "" of a folder
    modified: float = 0.0  # seconds since 1970; 0 if unknown

    @property
    def is_folder(self) -> bool:
        return not self.stamp


class Backend(Protocol):
    """Reads and writes small files by name; lists, moves and removes folders."""

    longest_poll: float  # maximum seconds between polls of a file that another process may change

    def location(self, name: str) -> str:
        """Path or URI of a name."""

    def read(self, name: str) -> bytes | None:
        """Contents of a file; None only if it does not exist."""

    def write(self, name: str, data: bytes, *, durable: bool = True) -> None:
        """Write a file atomically, replacing an existing one; `durable`: it survives a power failure."""

    def create(self, name: str, data: bytes) -> bool:
        """Write a file only if it does not exist; returns whether this call created it.

        Callers must pass unique data: a lost response is resolved by comparing contents.
        """

    def files(self, name: str) -> dict[str, int]:
        """Sizes in bytes of all files below a folder, by relative path; empty only if there are none."""

    def entries(self, name: str) -> dict[str, FileInfo]:
        """What is directly in a folder, by name; empty if it does not exist. Costs one listing."""

    def read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Bytes [start, end) of a file for each range, fewer at its end; b"" if it does not exist."""

    def move(self, name: str, target: str) -> None:
        """Rename a folder; `target` must not exist."""

    def remove(self, name: str) -> None:
        """Remove a file, or a folder recursively; no error if it does not exist."""


class FolderBackend:
    """A folder on this machine or on a shared file system."""

    longest_poll = 2.0

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, name: str) -> Path:
        return self.root / name

    def location(self, name: str) -> str:
        return str(self.path(name))

    def exists(self, name: str) -> bool:
        """Whether there is a file or folder of this name."""
        return state_files.exists(self.path(name))

    def read(self, name: str) -> bytes | None:
        return state_files.read(self.path(name))

    def write(self, name: str, data: bytes, *, durable: bool = True) -> None:
        state_files.write(self.path(name), data, durable=durable)

    def create(self, name: str, data: bytes) -> bool:
        path = self.path(name)
        try:
            retried(lambda: _create(path, data))
        except FileExistsError:
            # equal if an earlier attempt succeeded and only its result was lost
            return self.read(name) == data
        return True

    def files(self, name: str) -> dict[str, int]:
        sizes = {}
        for file, entry in walk(self.path(name)):
            with contextlib.suppress(FileNotFoundError):  # removed since it was listed
                status = retried(lambda entry=entry: os.stat(entry.path))
                if stat.S_ISREG(status.st_mode):
                    sizes[file] = status.st_size
        return sizes

    def entries(self, name: str) -> dict[str, FileInfo]:
        found = {}
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for entry in retried(lambda: _scan(self.path(name))):
                with contextlib.suppress(FileNotFoundError):  # removed since it was listed
                    status = entry.stat()
                    stamp = f"{status.st_ino}.{status.st_mtime_ns}" if stat.S_ISREG(status.st_mode) else ""
                    found[entry.name] = FileInfo(status.st_size, stamp, status.st_mtime)
        return found

    def read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        def read() -> list[bytes]:
            with self.path(name).open("rb", buffering=0) as file:
                return [os.pread(file.fileno(), end - start, start) for start, end in ranges]

        try:
            return retried(read)
        except (FileNotFoundError, NotADirectoryError):
            return [b""] * len(ranges)

    def move(self, name: str, target: str) -> None:
        source, path = self.path(name), self.path(target)
        retried(lambda: path.parent.mkdir(parents=True, exist_ok=True))
        try:
            retried(lambda: source.rename(path))
        except FileNotFoundError:
            if self.exists(name) or not self.exists(target):  # otherwise an earlier attempt moved it
                raise

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
            retried(lambda: path.unlink(missing_ok=True))


class ObjectBackend:
    """A prefix of an object store, accessed through fsspec. Raises ProfileError for an unknown scheme."""

    longest_poll = 30.0  # every poll is a request
    _exclusive: ClassVar[set[str]] = set()  # roots whose `create` is known to be exclusive

    def __init__(self, uri: str) -> None:
        from fsspec.core import url_to_fs

        try:
            # Listings are not cached: other processes write to the same prefix.
            self._client, self._root = url_to_fs(uri.rstrip("/"), use_listings_cache=False)
        except (ValueError, ImportError) as error:
            raise ProfileError("store", uri, str(error)) from error
        self._uri = uri.rstrip("/")
        self._reached = False  # whether a request has succeeded

    @property
    def _filesystem(self) -> AbstractFileSystem:
        renew_credentials(self._client)
        return self._client

    def location(self, name: str) -> str:
        return f"{self._uri}/{name}"

    def read(self, name: str) -> bytes | None:
        try:
            return self._retried(name, lambda: self._filesystem.cat_file(self._path(name)))
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes, *, durable: bool = True) -> None:
        self._retried(name, lambda: self._filesystem.pipe_file(self._path(name), data))

    def create(self, name: str, data: bytes) -> bool:
        """As Backend.create. Raises ProfileError if the object store lacks exclusive create: locks need it."""
        if self._root not in self._exclusive:
            self._require_exclusive_create()
            self._exclusive.add(self._root)
        return self._create(name, data)

    def files(self, name: str) -> dict[str, int]:
        root = self._path(name)
        found = self._retried(name, lambda: self._filesystem.find(root, detail=True))
        return {path.removeprefix(root).lstrip("/"): info["size"] for path, info in found.items()}

    def entries(self, name: str) -> dict[str, FileInfo]:
        try:
            listed = self._retried(name, lambda: self._filesystem.ls(self._path(name), detail=True))
        except FileNotFoundError:
            return {}
        found = {}
        for info in listed:
            file = info["name"].rstrip("/").rpartition("/")[2]
            if info["type"] == "directory":
                found[file] = FileInfo(0, "")
                continue
            moment = next((info[key] for key in MODIFIED if info.get(key)), 0.0)
            modified = moment.timestamp() if isinstance(moment, datetime) else float(moment)
            found[file] = FileInfo(info["size"], str(info.get("ETag") or modified or info["size"]), modified)
        return found

    def read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        paths, starts, ends = [self._path(name)] * len(ranges), *map(list, zip(*ranges, strict=True))
        try:
            return self._retried(
                name, lambda: self._filesystem.cat_ranges(paths, starts, ends, on_error="raise")
            )
        except FileNotFoundError:
            return [b""] * len(ranges)

    def remove(self, name: str) -> None:
        with self._os_errors(name), contextlib.suppress(FileNotFoundError):
            self._filesystem.rm(self._path(name), recursive=True)

    def move(self, name: str, target: str) -> None:
        """As Backend.move: copies inside the object store, then deletes the sources once all copies exist.

        Files at the top level, which identify the folder (run.json, manifest.json), are deleted last: an interrupted move does
        not leave a folder that looks empty.
        """
        sizes = self.files(name)
        self.copy(name, target)
        if not sizes.items() <= self.files(target).items():
            raise OSError(errno.EIO, "not all files of the folder were copied", self.location(target))
        for top in (False, True):
            if sources := [self._path(f"{name}/{file}") for file in sizes if ("/" not in file) == top]:
                with self._os_errors(name):
                    self._filesystem.rm(sources)

    def copy(self, name: str, target: str, last: str | None = None) -> None:
        """Copy a folder; the file `last` after all others. Raises FileNotFoundError if the folder lacks it."""
        names = sorted(self.files(name), key=lambda file: file == last)
        if last and last not in names:
            raise FileNotFoundError(errno.ENOENT, "no such file", self.location(f"{name}/{last}"))
        first = names[:-1] if last in names else names
        for group in (first, names[len(first) :]):
            if group:
                sources, targets = (
                    [self._path(f"{folder}/{file}") for file in group] for folder in (name, target)
                )
                with self._os_errors(name):
                    self._filesystem.copy(sources, targets)

    def upload(self, folder: Path, names: Sequence[str], target: str) -> None:
        """Upload files of a folder to below a name, concurrently; large files in parts."""
        targets = [f"{self._path(target)}/{name}" for name in names]
        with self._os_errors(target):
            self._filesystem.put([str(folder / name) for name in names], targets)

    def download(
        self, name: str, names: Sequence[str], folder: Path, on_file: Callable[[str], None] = lambda _: None
    ) -> None:
        """Download files below `name` into a folder, concurrently; calls `on_file` with the name of each.

        Raises ValueError for a name that would leave the folder.
        """

        def fetch(file: str) -> None:
            path = folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            remote = self._path(f"{name}/{file}")
            self._retried(f"{name}/{file}", lambda: self._filesystem.get_file(remote, str(path)))
            on_file(file)

        for file in names:
            checked_path(file)
        with ThreadPoolExecutor(PARALLEL_DOWNLOADS) as pool:
            list(pool.map(fetch, names))

    def _create(self, name: str, data: bytes) -> bool:
        try:
            with self._os_errors(name):
                self._filesystem.pipe_file(self._path(name), data, mode="create")
        except OSError:  # "already exists" is a different exception in each file system
            existing = self.read(name)
            if existing is None:
                raise
            return existing == data  # equal if the first attempt succeeded and only its response was lost
        return True

    def _require_exclusive_create(self) -> None:
        """Create an object twice: the second must fail, but some stores ignore the condition and overwrite."""
        from fsspec import AbstractFileSystem
        from fsspec.asyn import AsyncFileSystem

        name = f"locks/probe-{uuid4().hex}"
        reason = (
            "locks need writes that fail if the object exists (on S3, If-None-Match: *), which this object store lacks; use "
            "one that has them, or a shared folder"
        )
        # fsspec's own implementation checks and then writes, which is not exclusive.
        kind = type(self._filesystem)
        if kind.pipe_file is AbstractFileSystem.pipe_file and not issubclass(kind, AsyncFileSystem):
            raise ProfileError("store", self._uri, reason)
        try:
            if (
                not self._create(name, b"first")
                or self._create(name, b"second")
                or self.read(name) != b"first"
            ):
                raise ProfileError("store", self._uri, reason)
        except OSError as error:
            if isinstance(error.__cause__, NotImplementedError | TypeError):  # there is no such mode
                raise ProfileError("store", self._uri, reason) from error
            raise
        finally:
            with contextlib.suppress(OSError):
                self.remove(name)

    def _retried(self, name: str, operation: Callable[[], T]) -> T:
        def call() -> T:
            with self._os_errors(name):
                return operation()

        # Clients also retry, but not every temporary error: s3fs does not retry a 503 without a body.
        return retried(call)

    @contextlib.contextmanager
    def _os_errors(self, name: str) -> Iterator[None]:
        """Convert the client's own exceptions, raised after its retries, into OSError.

        Raises:
            ProfileError: there are no credentials, at the first access; later, their source may be unavailable for a while.
        """
        try:
            yield
            self._reached = True
        except OSError:
            raise
        except Exception as error:
            if type(error).__name__ == "NoCredentialsError" and not self._reached:
                raise ProfileError("store", self._uri, NO_CREDENTIALS) from None
            raise OSError(f"{self.location(name)}: {error}") from error

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


def _create(path: Path, data: bytes) -> None:
    """Create a file with its contents atomically: readers never see a part. Raises FileExistsError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        partial.write_bytes(data)
        try:
            os.link(partial, path)
        except OSError as error:
            if error.errno not in NO_HARD_LINKS:
                raise
            with path.open("xb") as file:
                file.write(data)
    finally:
        with contextlib.suppress(OSError):
            retried(lambda: partial.unlink(missing_ok=True))


def walk(folder: Path, prefix: str = "") -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Everything but folders below a folder, by relative path. Raises OSError if one cannot be listed."""
    try:
        entries = retried(lambda: _scan(folder))
    except (FileNotFoundError, NotADirectoryError):  # removed since it was listed, or never there
        return
    for entry in entries:
        if retried(lambda entry=entry: entry.is_dir(follow_symlinks=False)):
            yield from walk(Path(entry.path), f"{prefix}{entry.name}/")
        else:
            yield prefix + entry.name, entry


def _scan(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return list(entries)
