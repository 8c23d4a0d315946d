"""Files of tensors that are written in slices: made empty at their full size first, then filled in place.

What is written next is asked of the source when it is due, so a file costs a slice of memory, whatever its size.
"""

from __future__ import annotations

import hashlib
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallel.checkpoint.writer import bytes_of

SLICES = 2  # of a file, written at a time
READ = 1 << 22  # bytes that are hashed at a time


@dataclass(frozen=True)
class Entry:
    """A tensor to be written.

    Attributes:
        name: in the file.
        shape, dtype: in the file.
        rows: gives its rows [low, high) as tensors that follow each other, fewer where the last ones are padding, which
            stays zero.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: Callable[[int, int], Iterable[Tensor]]

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.shape[0] * self.row_bytes


class File(ABC):
    """A file of a checkpoint, to be written.

    Attributes:
        name: its path in the checkpoint's folder.
        nbytes: of its tensors.
    """

    name: str
    nbytes: int

    @abstractmethod
    def write(self, path: Path, limit: int, progress: Callable[[int], None]) -> tuple[Any, str]:
        """Write it with slices of at most `limit` bytes; `progress` is told of bytes as they are done.

        Returns:
            JSON that its format wants to know of it when all files are written, and the sha256 of its contents.
        """


class FilledFile(File):
    """A file that is made at its full size and then filled; its format says how it begins."""

    def __init__(self, name: str, entries: list[Entry]) -> None:
        self.name, self.entries = name, entries
        self.nbytes = sum(entry.nbytes for entry in entries)

    @abstractmethod
    def prepare(self, path: Path) -> Mapping[str, int]:
        """Make the file, all but the tensors' bytes; where each tensor's bytes begin."""

    def write(self, path: Path, limit: int, progress: Callable[[int], None]) -> tuple[None, str]:
        starts = self.prepare(path)
        with path.open("r+b", buffering=0) as file, ThreadPoolExecutor(SLICES) as pool:

            def fill(piece: tuple[Entry, int, int]) -> int:
                entry, low, high = piece
                begin = offset = starts[entry.name] + low * entry.row_bytes
                for tensor in entry.rows(low, high):
                    offset = write_at(file.fileno(), tensor.to(entry.dtype), offset)
                    progress(tensor.nbytes)
                return begin

            # What lies before a piece in the making is as it stays: it is hashed while what follows is written.
            hashed = Hashed(file.fileno())
            for begin in pool.map(fill, self._pieces(limit, starts)):
                hashed.follow(begin)
            return None, hashed.finish()

    def _pieces(self, limit: int, starts: Mapping[str, int]) -> Iterator[tuple[Entry, int, int]]:
        for entry in sorted(self.entries, key=lambda entry: starts[entry.name]):
            rows = max(1, limit // entry.row_bytes)
            for low in range(0, entry.shape[0], rows):
                yield entry, low, min(low + rows, entry.shape[0])


class Hashed:
    """The sha256 of a file that is written from its beginning to its end."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._at, self._digest = descriptor, 0, hashlib.sha256()

    def follow(self, stop: int) -> None:
        """Hash on to this offset, up to which the file is written."""
        while data := os.pread(self._descriptor, min(READ, max(0, stop - self._at)), self._at):
            self._digest.update(data)
            self._at += len(data)

    def finish(self) -> str:
        """Hash what is left; in hexadecimal."""
        self.follow(os.fstat(self._descriptor).st_size)
        return self._digest.hexdigest()


def write_at(descriptor: int, tensor: Tensor, offset: int) -> int:
    """Write a tensor's bytes at an offset of a file; returns where they end. What is mapped is written from where it lies."""
    data = bytes_of(tensor)
    while data:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count
    return offset


def digest(path: Path) -> str:
    """sha256 of a file's contents, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
