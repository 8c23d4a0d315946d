"""File locks between processes: flock, also over NFS, released when the process ends."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Over NFS, a shared lock needs a file that is open for reading, an exclusive one a file that is open for writing.
MODE = "a+b"


@contextmanager
def locked(path: Path, *, shared: bool = False, wait: bool = True) -> Iterator[None]:
    """Hold the lock of a file, created if needed, for a block.

    Args:
        shared: other processes may hold it in shared mode, too.

    Raises:
        BlockingIOError: another process holds it, and not `wait`.
    """
    with path.open(MODE) as file:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
        yield
