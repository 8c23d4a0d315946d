"""Files on remote file systems (fsspec): calls and reads are retried, then raise ConnectionError.

fsspec's `isfile`, `isdir`, `walk` and `glob` treat a failed request as absence, so this package uses `info`, `ls` and `find`.
Its file systems cache listings for as long as the process runs, though other processes write; so a listing starts with
`open_filesystem`, which forgets earlier ones.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from parallel.checkpoint import locations
from parallel.checkpoint.object_stores import explained, guard_answers, renew_credentials
from profiles.files import retries
from profiles.huggingface import hub

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

BLOCK = 1 << 23  # bytes per request to a remote file
DENIED = (401, 403)  # HTTP status codes
AT_COMMIT = re.compile("@[0-9a-f]{40}/")  # in a location on the hub
T = TypeVar("T")


def open_filesystem(location: str, *, refresh: bool = True, **options: Any) -> tuple[Any, str]:
    """The fsspec file system of a path or URL, and the path within it.

    Args:
        refresh: forget earlier listings; False uses them, such as the one that `location` comes from.
        options: of the file system.
    """
    if location.startswith("hf://"):
        hub.set_timeout()
        # Each thread has its own cached listings, which a new client has not.
        if not AT_COMMIT.search(location):
            options["skip_instance_cache"] = True
    filesystem, path = locations.open_filesystem(location, **options)
    if refresh and not AT_COMMIT.search(location):
        filesystem.invalidate_cache()
    return filesystem, path


def call(filesystem: Any, path: str, function: Callable[[], T]) -> T:
    """The result of a function that queries a file system about a path; a failed request is retried.

    Raises:
        FileNotFoundError: there is no such file.
        ConnectionError: all requests failed.
    """

    def renewed() -> T:
        renew_credentials(filesystem)
        guard_answers(filesystem)
        with explained():
            return function()

    return retries.call(renewed, f"{filesystem.unstrip_protocol(path)}: cannot be read")


def cat_file(filesystem: Any, path: str) -> bytes:
    """Contents of a small file; errors as `call`."""

    def read() -> bytes:
        data = locations.read_completely(filesystem, path)
        locations.reject_page(path, data)
        return data

    return call(filesystem, path, read)


def get_file(filesystem: Any, path: str, target: Path) -> None:
    """Download a file; errors as `call`."""

    def get() -> None:
        filesystem.get_file(path, str(target))
        locations.reject_page_file(path, target)

    call(filesystem, path, get)


def info(filesystem: Any, path: str) -> dict[str, Any] | None:
    """fsspec's info on a file or folder; None if it does not exist. Raises OSError if that is unknown."""
    try:
        found: dict[str, Any] = call(filesystem, path, lambda: filesystem.info(path))
    except (FileNotFoundError, NotADirectoryError) as error:
        if getattr(error.__cause__, "status", None) in DENIED:  # over HTTP
            raise PermissionError(f"{filesystem.unstrip_protocol(path)}: access denied") from error
        return None
    return found


def open_file(filesystem: Any, path: str, block: int | None = None) -> io.BufferedReader:
    """Open a file for reading in blocks: fsspec's own readline requests a whole block for each line."""
    block = block or BLOCK
    return io.BufferedReader(_RemoteFile(filesystem, path, block), block)


class _RemoteFile(io.RawIOBase):
    """A file whose reads are retried, each from its own position."""

    def __init__(self, filesystem: Any, path: str, block: int) -> None:
        self._filesystem, self._path, self._position = filesystem, path, 0
        # Text may begin with markup; over HTTP, a file with this name is rather an answer to another question.
        self._rejects_pages = not path.endswith(".txt") or path.startswith("http")
        self._file = self._call(lambda: filesystem.open(path, "rb", block_size=block))

    def _call(self, function: Callable[[], T]) -> T:
        return call(self._filesystem, self._path, function)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._file.seekable())

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = self._file.seek(offset, whence)
        return self._position

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer)

        def read() -> bytes:
            self._file.seek(self._position)
            data: bytes = self._file.read(len(view))
            if self._position == 0 and self._rejects_pages:
                locations.reject_page(self._path, data)
            return data

        data = self._call(read)
        view[: len(data)] = data
        self._position += len(data)
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()
