"""Readers of JSON Lines files and logs that another process appends to; only complete lines are read."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from profiles.files.state_files import open_file, parse, retried

log = logging.getLogger(__name__)

READ_BYTES = 1 << 20  # at once
NUMBERS = ("loss", "validation_loss", "step_seconds")  # metrics that are numbers wherever a row has them
_reported: set[tuple[Path, int]] = set()  # corrupted lines already logged; the same file has many followers


class LogFollower:
    """Follows a file, which may not exist yet, from byte `start`; restarts if it shrinks or is replaced.

    Args:
        on_restart: called before it starts over, for instance to forget the rows that were read.
    """

    def __init__(self, path: Path, start: int = 0, on_restart: Callable[[], None] = lambda: None) -> None:
        self._path = path
        self._offset = start
        self._on_restart = on_restart
        self._inode: int | None = None
        self._line = 0  # number of the last line read, from the start offset

    def lines(self) -> list[str]:
        """Complete lines added since the last call, about READ_BYTES at most; none if there are no more.

        A failed read is retried, then raised; the next call reads from the same position.
        """
        try:
            return retried(self._read)
        except FileNotFoundError:
            return []

    def _read(self) -> list[str]:
        with open_file(self._path) as file:
            status = os.fstat(file.fileno())
            if status.st_size < self._offset or self._inode not in (None, status.st_ino):
                self._offset = self._line = 0
                self._on_restart()
            self._inode = status.st_ino
            file.seek(self._offset)
            data = file.read(READ_BYTES)
            while b"\n" not in data and (more := file.read(READ_BYTES)):
                data += more
        complete, newline, _ = data.rpartition(b"\n")
        self._offset += len(complete) + len(newline)
        return complete.decode(errors="replace").splitlines() if newline else []

    def rows(self, is_valid: Callable[[dict[str, Any]], bool] = lambda row: True) -> Iterator[dict[str, Any]]:
        """New JSON objects of a JSON Lines file, up to its end.

        Lines that are not JSON objects, such as those of a process killed while writing, or not valid are skipped with one
        warning.
        """
        corrupted: list[int] = []
        while lines := self.lines():
            for line in lines:
                self._line += 1
                if (row := parse(line)) is not None and is_valid(row):
                    yield row
                else:
                    corrupted.append(self._line)
        if corrupted and (self._path, corrupted[0]) not in _reported:
            _reported.add((self._path, corrupted[0]))
            others = f" and {len(corrupted) - 1:,} more" if len(corrupted) > 1 else ""
            log.warning("%s: line %d%s: corrupted; skipped", self._path, corrupted[0], others)


def size_of(path: Path) -> int:
    """Size of a file in bytes, 0 if it does not exist yet; a failed stat is retried, then raised."""
    try:
        return retried(path.stat).st_size
    except FileNotFoundError:
        return 0


def last_row(path: Path, key: str) -> dict[str, Any] | None:
    """Last row of a JSON Lines file that has the key, read from the file's end; None if there is none."""
    try:
        return retried(lambda: _last_row(path, key))
    except FileNotFoundError:
        return None


def _last_row(path: Path, key: str) -> dict[str, Any] | None:
    with open_file(path) as file:
        end, size = file.seek(0, os.SEEK_END), READ_BYTES // 16
        while True:
            start = file.seek(max(0, end - size))
            data = file.read(end - start)
            if len(data) < end - start:
                raise OSError(errno.EIO, f"only {len(data)} of {end - start} bytes could be read", str(path))
            lines = data.split(b"\n")[:-1]  # the last part is a line that is still being written
            for line in reversed(lines[1:] if start else lines):
                if (row := parse(line)) is not None and key in row:
                    return row
            if start == 0:
                return None
            size *= 8


def is_metrics(row: dict[str, Any]) -> bool:
    """Whether a row has a step and only numbers, apart from the digest of an evaluated `checkpoint`."""
    return (
        isinstance(row.get("step"), int)
        and all(isinstance(row.get(name, 0), int | float) for name in NUMBERS)
        and not any(isinstance(value, str | dict) for name, value in row.items() if name != "checkpoint")
    )


def is_event(row: dict[str, Any]) -> bool:
    """Whether a row of events.jsonl has an event and a time."""
    return isinstance(row.get("event"), str) and isinstance(row.get("time"), int | float)
