"""Files of tensors, written in slices: created at their full size, then filled in place.

Each slice is read from the source when it is written, so writing takes the memory of a few slices for any file size.
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

SLICES = 2  # slices of a file written concurrently
READ = 1 << 22  # bytes hashed at a time


@dataclass(frozen=True)
class TensorEntry:
    """A tensor to write."""

    # name, shape, dtype: in the file
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    # (low, high) -> rows [low, high) as consecutive tensors; fewer rows at the end leave zeros as padding
    rows: Callable[[int, int], Iterable[Tensor]]
    leading: int = 1  # number of leading dims that index the rows

    @property
    def row_count(self) -> int:
        return math.prod(self.shape[: self.leading])

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[self.leading :]) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.row_count * self.row_bytes


class File(ABC):
    """A file of a checkpoint to write."""

    name: str  # its path relative to the checkpoint folder
    nbytes: int  # of its tensors

    @abstractmethod
    def write(self, path: Path, limit: int, progress: Callable[[int], None]) -> tuple[Any, str]:
        """Write the file in slices of at most `limit` bytes; calls `progress` with the bytes of each slice.

        Returns:
            JSON that the format needs once all files are written, and the sha256 of the file.
        """


class PreallocatedFile(File):
    """A file that is created at its full size and then filled; subclasses define its format."""

    def __init__(self, name: str, entries: list[TensorEntry]) -> None:
        self.name, self.entries = name, entries
        self.nbytes = sum(entry.nbytes for entry in entries)

    @abstractmethod
    def prepare(self, path: Path) -> Mapping[str, int]:
        """Create the file without the tensors' elements; returns the offset of each tensor's elements."""

    def write(self, path: Path, limit: int, progress: Callable[[int], None]) -> tuple[None, str]:
        starts = self.prepare(path)
        with path.open("r+b", buffering=0) as file, ThreadPoolExecutor(SLICES) as pool:

            def fill(rows: tuple[TensorEntry, int, int]) -> int:
                entry, low, high = rows
                begin = offset = starts[entry.name] + low * entry.row_bytes
                for tensor in entry.rows(low, high):
                    data = bytes_of(tensor.to(entry.dtype))  # not a copy
                    while data:
                        count = os.pwrite(file.fileno(), data, offset)
                        data, offset = data[count:], offset + count
                    progress(tensor.nbytes)
                return begin

            # The file is final up to the oldest slice in progress: hash it while later slices are written.
            hasher = FileHasher(file.fileno())
            for begin in pool.map(fill, self._slices(limit, starts)):
                hasher.advance(begin)
            return None, hasher.finish()

    def _slices(self, limit: int, starts: Mapping[str, int]) -> Iterator[tuple[TensorEntry, int, int]]:
        for entry in sorted(self.entries, key=lambda entry: starts[entry.name]):
            rows = max(1, limit // entry.row_bytes)
            for low in range(0, entry.row_count, rows):
                yield entry, low, min(low + rows, entry.row_count)


class FileHasher:
    """Incremental sha256 of a file that is written front to back."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._at, self._digest = descriptor, 0, hashlib.sha256()

    def advance(self, stop: int) -> None:
        """Hash up to offset `stop`, before which the file is final."""
        while data := os.pread(self._descriptor, min(READ, max(0, stop - self._at)), self._at):
            self._digest.update(data)
            self._at += len(data)

    def finish(self) -> str:
        """Hash the rest of the file; returns the hexadecimal digest."""
        self.advance(os.fstat(self._descriptor).st_size)
        return self._digest.hexdigest()


def file_sha256(path: Path) -> str:
    """Hexadecimal sha256 of a file's contents."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
