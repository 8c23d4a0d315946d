"""Files of tensors that are written in slices: made empty at their full size first, then filled in place.

What is written next is asked of the source when it is due, so a file costs a slice of memory, whatever its size.
"""

from __future__ import annotations

import hashlib
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Entry:
    """A tensor to be written.

    Attributes:
        name: in the file.
        shape, dtype: in the file.
        rows: gives its rows [low, high), fewer where the last ones are padding, which stays zero.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: Callable[[int, int], Tensor]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class File(ABC):
    """A file of a checkpoint, to be written.

    Attributes:
        name: its path in the checkpoint's folder.
        nbytes: of its tensors.
    """

    name: str
    nbytes: int

    @abstractmethod
    def write(self, path: Path, limit: int, progress: Callable[[int], None]) -> Any:
        """Write it with slices of at most `limit` bytes; `progress` is told of bytes as they are done.

        Returns:
            JSON that its format wants to know of it when all files are written.
        """


class FilledFile(File):
    """A file that is made at its full size and then filled; its format says how it begins."""

    def __init__(self, name: str, entries: list[Entry]) -> None:
        self.name, self.entries = name, entries
        self.nbytes = sum(entry.nbytes for entry in entries)

    @abstractmethod
    def prepare(self, path: Path) -> Mapping[str, int]:
        """Make the file, all but the tensors' bytes; where each tensor's bytes begin."""

    def write(self, path: Path, limit: int, progress: Callable[[int], None]) -> None:
        starts = self.prepare(path)
        with path.open("r+b", buffering=0) as file:
            for entry in self.entries:
                width = math.prod(entry.shape[1:]) * entry.dtype.itemsize  # bytes a row
                rows = max(1, limit // width)
                for low in range(0, entry.shape[0], rows):
                    tensor = entry.rows(low, min(low + rows, entry.shape[0]))
                    tensor = tensor.to(entry.dtype).contiguous()
                    _write(file.fileno(), tensor, starts[entry.name] + low * width)
                    progress(tensor.nbytes)


def _write(descriptor: int, tensor: Tensor, offset: int) -> None:
    data = memoryview(tensor.view(torch.uint8).numpy()).cast("B")
    while data:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count


def digest(path: Path) -> str:
    """sha256 of a file's contents, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
