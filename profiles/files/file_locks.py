"""File locks between processes: flock, also over NFS, released when the process ends."""

from __future__ import annotations

import errno
import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Over NFS, a shared lock needs a file that is open for reading, an exclusive one a file that is open for writing.
MODE = "a+b"
UNSUPPORTED = {errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK}  # for example by Lustre, mounted without `-o flock`


@contextmanager
def locked(path: Path, *, shared: bool = False, wait: bool = True, required: bool = True) -> Iterator[bool]:
    """Hold the lock of a file, created if needed, for a block; yields whether it is held.

    Args:
        shared: other processes may hold it in shared mode, too.
        required: raise an error if the file system has no locks, rather than enter the block without one.

    Raises:
        BlockingIOError: another process holds it, and not `wait`.
    """
    with path.open(MODE) as file:
        held = True
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            if required:
                reason = f"{error.strerror}; its file system has no file locks"
                raise OSError(error.errno, reason, str(path)) from error
            held = False
        yield held


def supported(path: Path) -> bool:
    """Whether the file system of a file has locks; creates the file if needed."""
    try:
        with locked(path, wait=False, required=False) as held:
            return held
    except BlockingIOError:  # held by another process
        return True
