"""Shard: the part of a source that is tokenized as one unit, a plain value that any machine can read.

Its digest covers its contents and how they are read, never paths or times: shards with equal digests contain the same
documents in the same order.
"""

from __future__ import annotations

import codecs
import errno
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from modeling.data.indexed import IndexedError
from profiles.huggingface import hub
from tasks.sources import remote

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

BUFFER = 1 << 17  # bytes that are read at once from a local file
HUB_PREFIX = "hf://datasets/"
# Keys of fsspec's info that identify the contents of a file, or else hold the time of its last change.
STATE_KEYS = (
    "blob_id",
    "ETag",
    "etag",
    "md5Hash",
    "LastModified",
    "Last-Modified",
    "last_modified",
    "mtime",
    "updated",
    "created",
)


OTHER_ENCODINGS = (  # by their byte order marks; that of UTF-16 begins that of UTF-32
    *(("UTF-32", mark) for mark in (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)),
    *(("UTF-16", mark) for mark in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)),
)


class SourceError(ValueError):
    """A source file whose contents do not match its format; the message names the file and the position."""


class SourceChanged(SourceError):
    """A file changed after it was hashed, so its contents must not be published under that key.

    Args:
        pinned: whether it was hashed when the run's inputs were resolved, and not just before it was read.
    """

    def __init__(self, path: str, pinned: bool = False) -> None:
        since = "has changed since the run's inputs were resolved; restore it, or resolve them again with --update"
        super().__init__(
            f"{shown(path)}: {since if pinned else 'changed while it was being read; run again'}"
        )


SOURCE_ERRORS = (SourceError, IndexedError)  # errors in the user's files: input errors, like a profile's


def is_corruption(error: Exception) -> bool:
    """Whether an error comes from a file's contents rather than from the network, the disk or permissions."""
    if isinstance(error, ConnectionError | TimeoutError | FileNotFoundError | PermissionError):
        return False
    return not isinstance(error, OSError) or error.errno is None


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Shard:
    """One separately cached part of a source; `Shard(**value)` reads its JSON."""

    name: str  # shown to users
    format: str  # how it is read, a key of readers.READERS
    digest: str  # hash of everything that its documents depend on
    paths: tuple[str, ...] = ()  # its files; most formats have one
    states: tuple[str, ...] = ()  # of these files when they were listed, before their digest was taken
    start: int = 0  # part of the file, in bytes of lines, row groups of parquet or record batches of arrow
    stop: int | None = None  # end of that part; None: the end of the file
    column: str = ""  # field with the text or the token ids, if records have fields
    source: int = 0  # index of its source in the profile
    use: str = "split"  # or "train" or "validation"
    anonymous: bool = False  # whether S3 is read without credentials
    fetch: bool = False  # whether a file on the hub is downloaded before it is read


def resolve_filesystem(
    path: str, *, anonymous: bool = False, token: str | None = None, refresh: bool = True
) -> tuple[Any, str]:
    """The fsspec file system of a path or URL, and the path within it; see `remote.open_filesystem`."""
    options: dict[str, Any] = {}
    if path.startswith("s3://"):
        options["anon"] = anonymous
    elif path.startswith(HUB_PREFIX) and token:
        options["token"] = token
    return remote.open_filesystem(path, refresh=refresh, **options)


def without_bom(start: bytes, path: str) -> bytes:
    """The start of a file without its UTF-8 byte order mark.

    Raises SourceError for the mark of another encoding.
    """
    for encoding, mark in OTHER_ENCODINGS:
        if start.startswith(mark):
            raise SourceError(f"{path}, byte 0: {encoding}, not UTF-8 text; convert it to UTF-8")
    return start.removeprefix(codecs.BOM_UTF8)


def local_path(path: str) -> Path | None:
    """A path or file:// URL as a path on this machine; None if it is remote."""
    if "://" in path and not path.startswith("file://"):
        return None
    return Path(path.removeprefix("file://"))


def shown(path: str) -> str:
    """A path for messages; bytes of a local name that are not UTF-8 are escaped."""
    return os.fsencode(path.removeprefix("file://")).decode("utf-8", "backslashreplace")


def open_file(shard: Shard, path: str, token: str | None = None, *, block: int | None = None) -> BinaryIO:
    """Open one of a shard's files for binary reading; failed reads of a remote file are retried.

    Args:
        block: bytes per request to a remote file; None: remote.BLOCK.
    """
    if shard.fetch and path.startswith(HUB_PREFIX):
        path = _download(path, token)
    if local := local_path(path):
        return io.BufferedReader(_LocalFile(local, "rb"), BUFFER)
    filesystem, remote_path = resolve_filesystem(path, anonymous=shard.anonymous, token=token, refresh=False)
    return remote.open_file(filesystem, remote_path, block)


class _LocalFile(io.FileIO):
    """A file whose reads fail if they end before the file: parsers would take that for its end."""

    def readinto(self, buffer: WriteableBuffer) -> int | None:
        count = super().readinto(buffer)
        if count == 0 and len(memoryview(buffer)):
            self._require_end()
        return count

    def readall(self) -> bytes:
        data = super().readall()
        self._require_end()
        return data

    def _require_end(self) -> None:
        if not self.seekable():
            return
        position, size = self.tell(), os.fstat(self.fileno()).st_size
        if position < size:
            raise OSError(errno.EIO, f"only {position} of {size} bytes could be read", self.name)


def _download(url: str, token: str | None) -> str:
    """Path of a file of the hub in its cache."""
    from huggingface_hub import hf_hub_download

    repository, _, rest = url.removeprefix(HUB_PREFIX).partition("@")
    revision, _, file = rest.partition("/")

    def download() -> str:
        commit = revision.replace("%2F", "/")
        return hf_hub_download(repository, file, repo_type="dataset", revision=commit, token=token)

    return hub.ask(download, "data.sources", repository, revision)


def states(shard: Shard, token: str | None = None) -> tuple[str, ...]:
    """The current states of a shard's files, in the order of `Shard.states`."""
    return tuple(_state(shard, path, token) for path in shard.paths)


def _state(shard: Shard, path: str, token: str | None) -> str:
    if _never_changes(path):
        return ""
    if local := local_path(path):
        # Opened, since NFS asks the server only then; without blocking, since the file may have become a pipe.
        descriptor = os.open(local, os.O_RDONLY | os.O_NONBLOCK)
        try:
            return _describe(os.fstat(descriptor))
        finally:
            os.close(descriptor)
    filesystem, remote_path = resolve_filesystem(path, anonymous=shard.anonymous, token=token)
    return remote_state(path, remote.call(filesystem, remote_path, lambda: filesystem.info(remote_path)))


def local_state(path: Path) -> str:
    """Size, modification time and inode of a file."""
    return _describe(path.stat())


def _describe(stat: os.stat_result) -> str:
    return f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ino}"


def remote_state(path: str, info: Mapping[str, Any]) -> str:
    """Size and ETag or mtime of a file, from fsspec's info; "" at a hub commit, which never changes."""
    if _never_changes(path):
        return ""
    found = next((str(info[key]) for key in STATE_KEYS if info.get(key)), "").strip('"')
    return f"{info['size']} {found}"


def _never_changes(path: str) -> bool:
    """Whether a path is at a commit of the hub."""
    return path.startswith(HUB_PREFIX) and remote.AT_COMMIT.search(path) is not None
