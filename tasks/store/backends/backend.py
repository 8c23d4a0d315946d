"""The protocol of all backends, listings, and the names that are valid in a store."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Protocol

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def checked_name(name: str) -> str:
    """The name, if it is valid as one component of a path in a store. Raises ValueError."""
    if not NAME.fullmatch(name):
        raise ValueError(f"{name!r}: invalid name in a store; use letters, digits, '.', '_' and '-'")
    return name


def checked_path(name: str) -> str:
    """The name of an untrusted listing, if its file is below the listed folder. Raises ValueError."""
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\0" in name:
        raise ValueError(f"{name!r} is not the name of a file below this folder")
    return name


@dataclass(frozen=True)
class FileInfo:
    """A file or folder in a listing."""

    size: int
    stamp: str  # differs after a change of the contents; "" of a folder
    modified: float = 0.0  # seconds since 1970; 0 if unknown

    @property
    def is_folder(self) -> bool:
        return not self.stamp


class Backend(Protocol):
    """Reads and writes small files by name; lists, moves and removes folders."""

    longest_poll: float  # maximum seconds between polls of a file that another process may change

    def location(self, name: str) -> str:
        """Path or URI of a name."""

    def read(self, name: str) -> bytes | None:
        """Contents of a file; None only if it does not exist."""

    def write(self, name: str, data: bytes, *, durable: bool = True) -> None:
        """Write a file atomically, replacing an existing one; `durable`: it survives a power failure."""

    def create(self, name: str, data: bytes) -> bool:
        """Write a file only if it does not exist; returns whether this call created it.

        Callers must pass unique data: a lost response is resolved by comparing contents.
        """

    def files(self, name: str) -> dict[str, int]:
        """Sizes in bytes of all files below a folder, by relative path; empty only if there are none."""

    def entries(self, name: str) -> dict[str, FileInfo]:
        """What is directly in a folder, by name; empty if it does not exist. Costs one listing."""

    def read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Bytes [start, end) of a file for each range, fewer at its end; b"" if it does not exist."""

    def move(self, name: str, target: str) -> None:
        """Rename a folder; `target` must not exist."""

    def remove(self, name: str) -> None:
        """Remove a file, or a folder recursively; no error if it does not exist."""
