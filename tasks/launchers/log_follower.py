"""Incremental reader of a file that another process appends to: new, complete lines only."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

_reported: set[tuple[Path, int]] = set()  # corrupted lines already logged; the same file has many followers


class LogFollower:
    """Follows a file, which need not exist yet, from byte `start` on; starts over if it shrinks or is replaced."""

    def __init__(self, path: Path, start: int = 0) -> None:
        self._path = path
        self._offset = start
        self._inode: int | None = None
        self._line = 0  # number of the last line read, from the start offset

    def lines(self) -> list[str]:
        """Complete lines added since the last call."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return []
        with file:
            status = self._path.stat()
            if status.st_size < self._offset or self._inode not in (None, status.st_ino):
                self._offset = self._line = 0
            self._inode = status.st_ino
            file.seek(self._offset)
            complete, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(complete) + len(newline)
        return complete.decode(errors="replace").splitlines() if newline else []

    def rows(self) -> list[dict[str, Any]]:
        """New JSON objects of a JSON Lines file.

        Lines that are not JSON objects, as a process that dies while writing leaves them, are skipped with one warning.
        """
        rows, corrupted = [], []
        for line in self.lines():
            self._line += 1
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if isinstance(row, dict):
                rows.append(row)
            else:
                corrupted.append(self._line)
        if corrupted and (self._path, corrupted[0]) not in _reported:
            _reported.add((self._path, corrupted[0]))
            others = f" and {len(corrupted) - 1:,} more" if len(corrupted) > 1 else ""
            log.warning("%s: line %d%s: not a JSON object; skipped", self._path, corrupted[0], others)
        return rows
