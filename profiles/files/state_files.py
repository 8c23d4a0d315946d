"""Small state files: written durably, replaced atomically, validated when read.

After a power failure a file may exist without its contents, and an empty or truncated file must not stop every later start.
`read_json` warns and returns None for a corrupted file: for state that can be rebuilt. For state that cannot, such as a counter
or a decision, `require_json` raises and names the file; `read_text` leaves it to the caller.

A failed read is not evidence that the file is missing: it is retried, then raised. Readers of other packages take it for a
missing or corrupted file, and so does a parser that gets only a part of the file. So what they parse comes from `read` or
`contents`, and what they open themselves from a `local_copy`.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import os
import random
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar
from uuid import uuid4

from profiles.files import retry_policies

log = logging.getLogger(__name__)
T = TypeVar("T")
Types = Mapping[str, Any]  # by key: a type, or a union of types
NO_TYPES: Types = {}

DELAYS = retry_policies.FILE.delays  # seconds before each retry, times 0.5 to 1.5
# Errors that a retry cannot fix. All others (ESTALE, EIO, EACCES, timeouts) may be temporary on a network file system.
PERMANENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError, FileExistsError)
PERMANENT_CODES = {
    *(
        errno.ENOTEMPTY,
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EROFS,
        errno.ENAMETOOLONG,
        errno.EINVAL,
        errno.EXDEV,
    ),
    *(errno.ENOTSUP, errno.ENOSYS, errno.EPERM, errno.ELOOP, errno.ENXIO),
}


class CorruptedState(ValueError):
    """A state file is empty, truncated or not what was written; the message names it and what to do."""


class NotRegularFile(OSError):
    """A pipe or a device is where a file belongs."""


def is_temporary(error: OSError) -> bool:
    """Whether a retry of a file operation may succeed."""
    return not isinstance(error, PERMANENT) and error.errno not in PERMANENT_CODES


def retried(operation: Callable[[], T], temporary: Callable[[OSError], bool] = is_temporary) -> T:
    """Run an idempotent file operation; possibly temporary OSErrors are retried after DELAYS."""
    for delay in DELAYS:
        try:
            return operation()
        except OSError as error:
            if not temporary(error):
                raise
            log.info("%s; retrying", error)
        time.sleep(delay * random.uniform(0.5, 1.5))
    return operation()


def write(path: Path, data: str | bytes, *, durable: bool = True, private: bool = False) -> None:
    """Replace a file atomically.

    Args:
        durable: contents and name are flushed to disk before it returns.
        private: no other user may read it.
    """
    contents = data.encode() if isinstance(data, str) else data
    retried(lambda: _write(path, contents, durable, private))


def make_folder(path: Path) -> None:
    """Create a folder and its parents, unless it exists.

    Raises NotADirectoryError, which names it, if a file, a pipe or a dangling link is in their place.

    Not with exist_ok of `Path.mkdir`: since Python 3.14, it says that a file is there if it cannot read a folder's status.
    """
    if _is_dir(path):
        return
    if path != path.parent:
        make_folder(path.parent)
    with contextlib.suppress(FileExistsError):
        path.mkdir()
        return
    if not _is_dir(path):  # otherwise another process was first
        reason = "a file, a pipe or a dangling link is where a folder belongs; move it away"
        raise NotADirectoryError(errno.ENOTDIR, reason, str(path))


def remove(path: Path) -> None:
    """Remove a folder, a file, a link or a pipe, on which `shutil.rmtree` would wait, as far as possible."""
    with contextlib.suppress(OSError):
        if _is_dir(path, follow_symlinks=False):
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name a file in errors of the block that have no path, such as of a write to a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def sync(path: Path | str) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_line(path: Path, line: str) -> None:
    """Append a line to a file, after the end of a line that was cut off, such as by a full disk."""
    with path.open("a+b") as file:
        torn = False
        if end := file.seek(0, os.SEEK_END):
            file.seek(end - 1)
            torn = file.read(1) != b"\n"
        file.write(b"\n" * torn + line.encode() + b"\n")


def exists(path: Path, *, follow_symlinks: bool = True) -> bool:
    """Whether there is a file or folder. Raises OSError if that is unknown.

    Since Python 3.14, `Path.exists`, `is_file`, `is_dir` and `is_symlink` are False in that case, as all of `os.path`.
    """
    return retried(lambda: _mode(path, follow_symlinks)) is not None


def is_file(path: Path) -> bool:
    """Whether there is a regular file. Raises OSError if that is unknown."""
    return stat.S_ISREG(retried(lambda: _mode(path)) or 0)


def is_dir(path: Path, *, follow_symlinks: bool = True) -> bool:
    """Whether there is a folder. Raises OSError if that is unknown."""
    return retried(lambda: _is_dir(path, follow_symlinks))


def is_link(path: Path) -> bool:
    """Whether there is a symbolic link. Raises OSError if that is unknown."""
    return stat.S_ISLNK(retried(lambda: _mode(path, follow_symlinks=False)) or 0)


def _is_dir(path: Path, follow_symlinks: bool = True) -> bool:
    return stat.S_ISDIR(_mode(path, follow_symlinks) or 0)


def _mode(path: Path, follow_symlinks: bool = True) -> int | None:
    try:
        return (path.stat() if follow_symlinks else path.lstat()).st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):  # the last for a name that no file can have
        return None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENAMETOOLONG):
            return None
        raise


def read(path: Path) -> bytes | None:
    """Contents of a file; None only if it does not exist. Raises OSError if it cannot be read."""
    try:
        return contents(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def contents(path: Path) -> bytes:
    """Contents of a file that must exist. Raises OSError if it cannot be read completely."""
    return retried(lambda: read_once(path))


@contextlib.contextmanager
def local_copy(folder: Path, suffixes: Collection[str]) -> Iterator[Path]:
    """A temporary copy of a folder's files with these suffixes, for readers of other packages."""
    with tempfile.TemporaryDirectory() as name:
        for path in retried(lambda: [*folder.iterdir()]):
            if path.suffix in suffixes:
                Path(name, path.name).write_bytes(contents(path))
        yield Path(name)


def open_file(path: Path, buffering: Literal[-1, 0] = -1) -> io.BufferedReader | io.FileIO:
    """Open a regular file for reading.

    Raises OSError for anything else: NotRegularFile for a pipe, which would wait for its writer, or an endless device.
    """
    # io.open, as Path.open: tests replace it
    if buffering == 0:
        return io.open(path, "rb", 0, opener=_open_regular)  # noqa: UP020
    return io.open(path, "rb", opener=_open_regular)  # noqa: UP020


def _open_regular(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # `open` rejects folders
        os.close(descriptor)
        raise NotRegularFile(errno.EINVAL, "is not a regular file", path)
    return descriptor


def read_text(path: Path) -> str | None:
    """`read`, as text."""
    data = read(path)
    return None if data is None else data.decode(errors="replace")


def read_json(path: Path, types: Types = NO_TYPES, required: Collection[str] = ()) -> dict[str, Any] | None:
    """The JSON object in a file; None if it does not exist, and None with a warning if it is corrupted.

    Args:
        types: of values; another type is a corruption.
        required: keys without which the object is corrupted.
    """
    text = read_text(path)
    return None if text is None else parse_json(text, path, types, required)


def parse_json(
    text: str | bytes, location: Path | str, types: Types = NO_TYPES, required: Collection[str] = ()
) -> dict[str, Any] | None:
    """As `read_json`, for the contents of a file."""
    try:
        return require_json(text, location, types, required, "ignored")
    except CorruptedState as error:
        log.warning("%s", error)
        return None


def wrong_key(
    found: Mapping[str, Any], types: Types = NO_TYPES, required: Collection[str] = ()
) -> str | None:
    """The first key that is missing or has a value of another type; None if there is none."""
    missing = (key for key in required if key not in found)
    others = (key for key, kind in types.items() if key in found and not isinstance(found[key], kind))
    return next(missing, None) or next(others, None)


def parse(text: str | bytes) -> dict[str, Any] | None:
    """The JSON object of a text; None if there is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def require_json(
    data: str | bytes,
    location: Path | str,
    types: Types = NO_TYPES,
    required: Collection[str] = (),
    advice: str = "restore the file, or move it away if it is not needed",
) -> dict[str, Any]:
    """The JSON object in the contents of a state file; arguments as for `read_json`.

    Raises CorruptedState if there is none.
    """
    found = parse(data)
    if found is None or (wrong := wrong_key(found, types, required)) is not None:
        reason = _defect(data) if found is None else f"missing or invalid {wrong}"
        raise CorruptedState(f"{location}: corrupted ({reason}); {advice}")
    return found


def _defect(data: str | bytes) -> str:
    text = data.decode(errors="replace") if isinstance(data, bytes) else data
    return "not a JSON object" if text.strip("\0 \n") else "empty"


def read_once(path: Path, limit: int = -1) -> bytes:
    """The first `limit` bytes of a regular file, or all. Raises OSError, also on a short read."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(limit)
    if len(data) < (size if limit < 0 else min(size, limit)):
        raise OSError(errno.EIO, f"only {len(data)} of {size} bytes could be read", str(path))
    return data


def _write(path: Path, data: bytes, durable: bool, private: bool) -> None:
    make_folder(path.parent)
    partial = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        with naming(path), partial.open("wb") as file:
            if private:
                partial.chmod(0o600)
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            retried(lambda: partial.unlink(missing_ok=True))
        raise
    if durable:
        sync(path.parent)
