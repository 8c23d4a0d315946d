"""A store in a folder of this machine or of a shared file system."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

from profiles.files import folders, state_files
from profiles.files.state_files import retried
from tasks.store.backends.backend import FileInfo

REMOVED = "removed-"  # begins the names of folders that are being removed
NO_STAGING = {errno.EXDEV, errno.ENOSPC, errno.EDQUOT}  # another disk, or no room for a folder
NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}


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
            existing = self.read(name)
            if existing is None and state_files.is_link(path):  # no listing shows it
                reason = "a dangling link is where a file belongs; move it away"
                raise FileExistsError(errno.EEXIST, reason, str(path)) from None
            return existing == data  # equal if an earlier attempt succeeded and only its result was lost
        return True

    def files(self, name: str) -> dict[str, int]:
        sizes = {}
        for file, entry in folders.walk(self.path(name), follow=True):  # a run may be on another disk
            try:
                status = retried(entry.stat)
            except OSError as error:
                if not folders.is_gone(error):
                    raise
                continue
            if stat.S_ISREG(status.st_mode):
                sizes[file] = status.st_size
        return sizes

    def entries(self, name: str) -> dict[str, FileInfo]:
        found = {}
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for entry in retried(lambda: folders.scan(self.path(name))):
                try:
                    status = entry.stat()
                except OSError as error:
                    if not folders.is_gone(error):
                        raise
                    continue
                stamp = f"{status.st_ino}.{status.st_mtime_ns}" if stat.S_ISREG(status.st_mode) else ""
                found[entry.name] = FileInfo(status.st_size, stamp, status.st_mtime)
        return found

    def read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        def read() -> list[bytes]:
            with state_files.open_file(self.path(name), buffering=0) as file:
                return [os.pread(file.fileno(), end - start, start) for start, end in ranges]

        try:
            return retried(read)
        except (FileNotFoundError, NotADirectoryError):
            return [b""] * len(ranges)

    def move(self, name: str, target: str) -> None:
        source, path = self.path(name), self.path(target)
        retried(lambda: state_files.make_folder(path.parent))
        try:
            retried(lambda: source.rename(path))
        except FileNotFoundError:
            if self.exists(name) or not self.exists(target):  # otherwise an earlier attempt moved it
                raise
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            _copy_folder(source, path)
            self.remove(name)

    def remove(self, name: str) -> None:
        if aside := self.set_aside(name):
            shutil.rmtree(aside, ignore_errors=True)

    def set_aside(self, name: str) -> Path | None:
        """Remove a folder by renaming it, so that no reader sees a part of it; returns what is left to delete.

        A file is deleted. None if nothing is left.
        """
        path = self.path(name)
        if not state_files.is_dir(path, follow_symlinks=False):
            retried(lambda: path.unlink(missing_ok=True))
            return None
        removed = f"{REMOVED}{uuid4().hex}"
        try:
            return _renamed(path, self.root / "staging" / removed)
        except OSError as error:
            if error.errno not in NO_STAGING:
                raise
        return _renamed(path, path.with_name(f".{removed}"))  # needs neither room nor the same disk


def _renamed(path: Path, target: Path) -> Path | None:
    """Rename a folder; None if it was removed meanwhile."""
    state_files.make_folder(target.parent)
    try:
        path.rename(target)
    except FileNotFoundError:
        return None
    return target


def _copy_folder(source: Path, target: Path) -> None:
    """Copy a folder to another disk, where it appears complete or not at all."""
    partial = target.with_name(f".{REMOVED}{uuid4().hex}")  # removed if this process is killed
    try:
        shutil.copytree(source, partial, symlinks=True)
        for _, entry in folders.walk(partial):
            state_files.sync(entry.path)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _create(path: Path, data: bytes) -> None:
    """Create a file with its contents atomically: readers never see a part. Raises FileExistsError."""
    state_files.make_folder(path.parent)
    partial = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        with state_files.naming(path):
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
