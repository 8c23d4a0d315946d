"""Reading a file that another program is writing: only what is new, only whole lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Tail:
    """Follows a file that need not exist yet. A file that shrank or was replaced is read from its start again."""

    def __init__(self, path: Path, start: int = 0) -> None:
        self._path = path
        self._offset = start
        self._inode: int | None = None

    def lines(self) -> list[str]:
        """The whole lines that were added since the last call."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return []
        with file:
            status = self._path.stat()
            if status.st_size < self._offset or self._inode not in (None, status.st_ino):
                self._offset = 0
            self._inode = status.st_ino
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        return whole.decode(errors="replace").splitlines() if newline else []

    def rows(self) -> list[dict[str, Any]]:
        """The same for a file of JSON lines."""
        return [json.loads(line) for line in self.lines()]
