"""Until when a process has time, told to whoever looks at it from outside.

A file <pid> in the folder that the environment names, of this machine only: eight bytes, the time of `time.monotonic` (one clock
for all processes of a machine) at which the process has had all the time it may take, then the path where its stacks belong.
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
_DUE = struct.Struct("=d")
_SET_PTRACER = 0x59616D61  # prctl's PR_SET_PTRACER, of Yama


class Heartbeat:
    """This process's; nobody may be looking."""

    def __init__(self, stacks: Path) -> None:
        """Args: stacks: file for the stacks of this process."""
        self._path: Path | None = None
        self._map: mmap.mmap | None = None
        folder = os.environ.get(FOLDER)
        if folder is None:
            return
        path = Path(folder) / str(os.getpid())
        with contextlib.suppress(OSError):  # whoever looked has gone
            partial = path.with_suffix(".partial")
            partial.write_bytes(_DUE.pack(float("inf")) + os.fsencode(stacks.absolute()))
            with partial.open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), _DUE.size)
            self._path = partial.rename(path)
            with contextlib.suppress(AttributeError):  # no Linux
                ctypes.CDLL(None).prctl(_SET_PTRACER, os.getppid(), 0, 0, 0)

    def due(self, at: float) -> None:
        """It has time until then."""
        if self._map is not None:
            _DUE.pack_into(self._map, 0, at)

    def end(self) -> None:
        """Nobody has to look any longer."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


@dataclass(frozen=True)
class Seen:
    """A process as it is seen from outside."""

    pid: int
    due: float
    stacks: Path

    @classmethod
    def all(cls, folder: Path) -> Iterator[Self]:
        for path in folder.iterdir():
            if path.name.isdecimal():
                with contextlib.suppress(FileNotFoundError):
                    told = path.read_bytes()
                    yield cls(int(path.name), *_DUE.unpack_from(told), Path(os.fsdecode(told[_DUE.size :])))

    def forget(self, folder: Path) -> None:
        (folder / str(self.pid)).unlink(missing_ok=True)
