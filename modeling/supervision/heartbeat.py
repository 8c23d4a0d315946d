"""Heartbeat file: this process's deadline, read by this machine's external watchdog (torchrun.py).

The file is <pid> in the folder named by the environment variable: eight bytes, the deadline on the clock of `time.monotonic`,
which all processes of a machine share; then the path of the file for the process's stacks.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

FOLDER = "TRAINSHED_HEARTBEATS"
_DEADLINE = struct.Struct("=d")
_SET_PTRACER = 0x59616D61  # prctl's PR_SET_PTRACER of Yama, the Linux security module


class Heartbeat:
    """Heartbeat file of this process; does nothing without an external watchdog.

    Args:
        stacks: file to which the external watchdog writes this process's stacks.
    """

    def __init__(self, stacks: Path) -> None:
        self._path: Path | None = None
        self._shared: memoryview[float] | None = None
        folder = os.environ.get(FOLDER)
        if folder is None:
            return
        path = Path(folder) / str(os.getpid())
        with contextlib.suppress(OSError):  # the watchdog has exited
            partial = path.with_suffix(".partial")
            partial.write_bytes(_DEADLINE.pack(float("inf")) + os.fsencode(stacks.absolute()))
            with partial.open("r+b") as file:
                self._shared = memoryview(mmap.mmap(file.fileno(), _DEADLINE.size)).cast("d")
            self._path = partial.rename(path)
            with contextlib.suppress(AttributeError):  # not Linux
                ctypes.CDLL(None).prctl(_SET_PTRACER, os.getppid(), 0, 0, 0)

    def set_deadline(self, deadline: float) -> None:
        """Set this process's deadline, before which it must set a later one."""
        if self._shared is not None:
            # One store of eight bytes. `struct` writes zeros first; the watchdog that reads these ends this process as hung.
            self._shared[0] = deadline

    def close(self) -> None:
        """Remove the file: the process is no longer watched."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


@dataclass(frozen=True)
class WatchedProcess:
    """A heartbeat file as the external watchdog reads it."""

    pid: int
    deadline: float
    stacks: Path

    @classmethod
    def read_all(cls, folder: Path) -> Iterator[Self]:
        for path in folder.iterdir():
            if path.name.isdecimal():
                with contextlib.suppress(FileNotFoundError):
                    content = path.read_bytes()
                    stacks = Path(os.fsdecode(content[_DEADLINE.size :]))
                    (deadline,) = _DEADLINE.unpack_from(content)
                    yield cls(int(path.name), deadline, stacks)

    def remove(self, folder: Path) -> None:
        (folder / str(self.pid)).unlink(missing_ok=True)
