"""Reading a file that another program is writing: only what is new, only whole lines."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

_named: set[tuple[Path, int]] = set()  # lines that a warning has named: files are read again and again


class LogFollower:
    """Follows a file that need not exist yet. A file that shrank or was replaced is read from its start again."""

    def __init__(self, path: Path, start: int = 0) -> None:
        self._path = path
        self._offset = start
        self._inode: int | None = None
        self._read = 0  # lines, since where reading began

    def lines(self) -> list[str]:
        """The whole lines that were added since the last call."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return []
        with file:
            status = self._path.stat()
            if status.st_size < self._offset or self._inode not in (None, status.st_ino):
                self._offset = self._read = 0
            self._inode = status.st_ino
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        return whole.decode(errors="replace").splitlines() if newline else []

    def rows(self) -> list[dict[str, Any]]:
        """The same for a file of JSON objects, one a line.

        What is none, as a process or a machine leaves it that dies while it writes, is left out, with one warning.
        """
        found, spoilt = [], []
        for line in self.lines():
            self._read += 1
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if isinstance(row, dict):
                found.append(row)
            else:
                spoilt.append(self._read)
        if spoilt and (self._path, spoilt[0]) not in _named:
            _named.add((self._path, spoilt[0]))
            others = f", nor are {len(spoilt) - 1:,} after it" if len(spoilt) > 1 else ""
            log.warning("%s: line %d is no JSON object%s: left out", self._path, spoilt[0], others)
        return found
