"""Fault injection at the lowest layer: failing calls to the operating system or to an object store.

Network file systems fail in all of these ways: with an error before or after the operation took effect, or by returning less than
the complete file.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

ERRORS = (errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.EACCES)
READS = ("scandir", "listdir", "stat", "lstat", "open")
OF_PATHS = {
    "exists": os.path.exists,
    "is_file": os.path.isfile,
    "is_dir": os.path.isdir,
    "is_symlink": os.path.islink,
}
WRITES = ("rename", "replace", "link", "unlink", "mkdir")
Fault = Callable[[str, str], OSError | str | None]
"""Called with an operation and a path; returns the error to raise, "short" to read only half of the file, or None."""


def failing(*operations: str, path: str, error: int = errno.EIO) -> Fault:
    """A fault of these operations on every path that ends with `path`."""
    return lambda operation, at: (
        OSError(error, os.strerror(error), at) if operation in operations and at.endswith(path) else None
    )


class AtFirst:
    """The first two calls of each operation on a path fail; the third `open` reads half of the file."""

    def __init__(self) -> None:
        self._calls: Counter[tuple[str, str]] = Counter()

    def __call__(self, operation: str, path: str) -> OSError | str | None:
        self._calls[operation, path] += 1
        number = self._calls[operation, path]
        if number > 2:
            return "short" if (operation, number) == ("open", 3) else None
        return OSError(errno.EIO, os.strerror(errno.EIO), path)


class Once:
    """Random faults: at most one per operation and path, and three in any 30 consecutive operations."""

    def __init__(self, seed: int, share: float) -> None:
        self._random, self._share = Random(seed), share
        self._done: set[tuple[str, str]] = set()
        self._recent = [False] * 30
        self.count = 0

    def __call__(self, operation: str, path: str) -> OSError | str | None:
        key = operation, re.sub("[0-9a-f]{32}", "*", path)  # a unique name, which changes in every attempt
        fails = key not in self._done and sum(self._recent) < 3 and self._random.random() < self._share
        self._recent = [*self._recent[1:], fails]
        if not fails:
            return None
        self._done.add(key)
        self.count += 1
        code = self._random.choice(ERRORS)
        short = operation == "open" and self._random.random() < 0.3
        return "short" if short else OSError(code, os.strerror(code), path)

    @property
    def after(self) -> bool:
        """Whether the failing operation takes effect nevertheless."""
        return self._random.random() < 0.5


class _Short(io.FileIO):
    """A file of which only the first half can be read."""

    def __init__(self, path: Any) -> None:
        super().__init__(path, "rb")
        self._left = os.fstat(self.fileno()).st_size // 2

    def readinto(self, buffer: Any) -> int:
        count = super().readinto(memoryview(buffer)[: self._left])
        self._left -= count
        return count

    def readall(self) -> bytes:
        return super().read(self._left)


def inject(monkeypatch: pytest.MonkeyPatch, root: Path, fault: Fault) -> None:
    """Make calls to the operating system on paths in a folder fail as `fault` decides.

    In every version of Python, `Path.is_dir` and the like take a failed call for no, as since Python 3.14.
    """

    def wrap(module: Any, name: str, operation: str) -> None:
        original = getattr(module, name)

        def call(path: Any, *arguments: Any, **options: Any) -> Any:
            if not isinstance(path, str | os.PathLike) or not str(path).startswith(str(root)):
                return original(path, *arguments, **options)
            found = fault(operation, str(path))
            if found == "short":
                mode = arguments[0] if arguments else options.get("mode", "r")
                found = None
                if mode == "rb":
                    return io.BufferedReader(_Short(path))
            if found is not None:
                if operation in WRITES and getattr(fault, "after", False):
                    original(path, *arguments, **options)
                raise found
            return original(path, *arguments, **options)

        monkeypatch.setattr(module, name, call)

    for name in (*READS, *WRITES):
        wrap(os, name, name)
    wrap(io, "open", "open")
    for name, function in OF_PATHS.items():
        monkeypatch.setattr(Path, name, lambda path, function=function: function(path))


def inject_objects(monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    """Make operations on the in-memory object store, `memory://`, fail as `fault` decides."""
    from fsspec.implementations.memory import MemoryFileSystem

    def wrap(name: str) -> None:
        original = getattr(MemoryFileSystem, name)

        def call(self: MemoryFileSystem, *arguments: Any, **options: Any) -> Any:
            if name == "ls" and sys._getframe(1).f_code.co_name == "walk":  # of `rm`, which ignores failures
                return original(self, *arguments, **options)
            found = fault(name, str(arguments[name == "put_file"]))
            if not isinstance(found, OSError):
                return original(self, *arguments, **options)
            if name not in ("find", "ls", "cat_file") and getattr(fault, "after", False):
                original(self, *arguments, **options)
            raise found

        monkeypatch.setattr(MemoryFileSystem, name, call)

    for name in ("find", "ls", "cat_file", "get_file", "pipe_file", "put_file", "cp_file", "rm_file"):
        wrap(name)


def lock_as_nfs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make flock fail as over NFS, without a descriptor for reading (shared) or writing (exclusive)."""
    flock = fcntl.flock

    def checked(file: Any, operation: int) -> None:
        wrong = os.O_WRONLY if operation & fcntl.LOCK_SH else os.O_RDONLY
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == wrong:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", checked)


def deny_locks(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> None:
    """Make flock fail in these folders, as on a file system without locks."""
    flock = fcntl.flock

    def checked(file: Any, operation: int) -> None:
        if any(Path(file.name).is_relative_to(folder) for folder in folders):
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", checked)
