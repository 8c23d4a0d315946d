"""A store below a prefix of an object store, such as S3."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeVar
from uuid import uuid4

from parallel.checkpoint.locations import reject_page, reject_page_file
from parallel.checkpoint.object_stores import (
    delete,
    explained,
    find,
    guard_answers,
    is_not_supported,
    renew_credentials,
)
from profiles.errors import ProfileError, counted
from profiles.files import state_files
from profiles.files.state_files import retried
from tasks.store.backends.backend import FileInfo, checked_path

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

PARALLEL_DOWNLOADS = 8
ETAG = ("ETag", "etag")  # in fsspec's listings: of S3; of GCS and Azure
MODIFIED = ("LastModified", "last_modified", "mtime", "created", "updated")  # likewise
CHECKSUMS = (
    "the object store does not support the checksums that AWS SDKs add to uploads; set "
    "AWS_REQUEST_CHECKSUM_CALCULATION=when_required"
)
NO_CREATE = (
    "locks need writes that fail if the object exists (on S3, If-None-Match: *), which this object store lacks; use one that has "
    "them, or a shared folder"
)
NO_CREDENTIALS = "no S3 credentials; set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
T = TypeVar("T")


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
        guard_answers(self._client)
        return self._client

    def location(self, name: str) -> str:
        return f"{self._uri}/{name}"

    def read(self, name: str) -> bytes | None:
        try:
            return self._retried(name, lambda: self._read(name))
        except FileNotFoundError:
            return None

    def _read(self, name: str) -> bytes:
        data: bytes = self._filesystem.cat_file(self._path(name))
        reject_page(self.location(name), data)
        return data

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
        found = self._retried(name, lambda: find(self._filesystem, root))
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
            etag = next((info[key] for key in ETAG if info.get(key)), None)
            found[file] = FileInfo(info["size"], str(etag or modified or info["size"]), modified)
        return found

    def read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        paths, starts, ends = [self._path(name)] * len(ranges), *map(list, zip(*ranges, strict=True))
        try:
            return self._retried(
                name, lambda: self._filesystem.cat_ranges(paths, starts, ends, on_error="raise")
            )
        except FileNotFoundError:
            return [b""] * len(ranges)

    def lacks_bucket(self) -> bool:
        """Whether an S3 server says that the bucket does not exist, of which an empty listing says nothing."""
        call = getattr(self._filesystem, "call_s3", None)
        if call is None:
            return False
        bucket = self._root.partition("/")[0]
        try:
            self._retried("", lambda: call("head_bucket", Bucket=bucket))
        except FileNotFoundError:
            return True
        except OSError:  # such as of a user who may read the prefix only
            return False
        return False

    def remove(self, name: str) -> None:
        found = self.files(name)
        with contextlib.suppress(FileNotFoundError):
            if found.keys() == {""}:  # a single object, whose refusal is an error
                self._retried(name, lambda: self._filesystem.rm_file(self._path(name)))
                return
            self._retried(name, lambda: delete(self._filesystem, self._path(name)))
        self._require_removed(name, found)

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
                self._retried(name, partial(delete, self._filesystem, sources))
                self._require_removed(name, [file for file in sizes if ("/" not in file) == top])

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
                self._retried(name, partial(self._filesystem.copy, sources, targets))

    def upload(self, folder: Path, names: Sequence[str], target: str) -> None:
        """Upload files of a folder to below a name, concurrently; large files in parts."""
        targets = [f"{self._path(target)}/{name}" for name in names]
        self._retried(target, lambda: self._filesystem.put([str(folder / name) for name in names], targets))

    def download(
        self, name: str, names: Sequence[str], folder: Path, on_file: Callable[[str], None] = lambda _: None
    ) -> None:
        """Download files below `name` into a folder, concurrently; calls `on_file` with the name of each.

        Raises ValueError for a name that would leave the folder.
        """

        def fetch(file: str) -> None:
            path = folder / file
            state_files.make_folder(path.parent)
            self._retried(f"{name}/{file}", lambda: get(file, path))
            on_file(file)

        def get(file: str, path: Path) -> None:
            self._filesystem.get_file(self._path(f"{name}/{file}"), str(path))
            reject_page_file(self.location(f"{name}/{file}"), path)

        for file in names:
            checked_path(file)
        with ThreadPoolExecutor(PARALLEL_DOWNLOADS) as pool:
            list(pool.map(fetch, names))

    def _require_removed(self, name: str, files: Iterable[str]) -> None:
        """Raise PermissionError if files of a folder still exist.

        S3 reports each refused deletion in an answer with status 200.
        """
        if left := sorted({*files} & self.files(name).keys()):
            kept = counted(len(left), "file")
            reason = f"the object store refused to delete {kept} (permission, or an object lock), such as {left[0]}"
            raise PermissionError(errno.EACCES, reason, self.location(name))

    def _create(self, name: str, data: bytes) -> bool:
        def create() -> bool:
            try:
                with self._os_errors(name):
                    self._filesystem.pipe_file(self._path(name), data, mode="create")
            except OSError:  # "already exists" is a different exception in each file system
                existing = self.read(name)
                if existing is None:  # such as by a conflict with another request, which S3 asks to repeat
                    raise
                return existing == data  # equal if the first attempt succeeded and only its response was lost
            return True

        return retried(create)

    def _require_exclusive_create(self) -> None:
        """Create an object twice: the second must fail, but some stores ignore the condition and overwrite."""
        from fsspec import AbstractFileSystem
        from fsspec.asyn import AsyncFileSystem

        name = f"locks/probe-{uuid4().hex}"
        # fsspec's own implementation checks and then writes, which is not exclusive.
        kind = type(self._filesystem)
        if kind.pipe_file is AbstractFileSystem.pipe_file and not issubclass(kind, AsyncFileSystem):
            raise ProfileError("store", self._uri, NO_CREATE)
        try:
            created = self._create(name, b"first"), self._create(name, b"second")
            stored = self.read(name)
            # The encoding that carries a checksum became a part of it.
            if stored not in (None, b"first", b"second"):
                raise ProfileError("store", self._uri, CHECKSUMS)
            if created != (True, False) or stored != b"first":
                raise ProfileError("store", self._uri, NO_CREATE)
        except OSError as error:
            if isinstance(error.__cause__, NotImplementedError | TypeError):  # there is no such mode
                raise ProfileError("store", self._uri, NO_CREATE) from error
            if is_not_supported(error) and self._accepts_without_checksum(name):
                raise ProfileError("store", self._uri, CHECKSUMS) from error
            raise
        finally:
            with contextlib.suppress(OSError):
                self.remove(name)

    def _accepts_without_checksum(self, name: str) -> bool:
        """Whether an S3 server accepts a write without the checksum that AWS SDKs add by default."""
        if "s3" not in self._client.protocol:
            return False
        options = {"config_kwargs": {"request_checksum_calculation": "when_required"}}
        client = type(self._client)(**{**self._client.storage_options, **options})
        try:
            with self._os_errors(name):
                client.pipe_file(self._path(name), b"first")
        except OSError:
            return False
        return True

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
            with explained():
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
