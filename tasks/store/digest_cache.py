"""What is known about the contents of local files, remembered so that a corpus is not read again each time it is planned.

A note holds for as long as the file's size and time of modification are as they were, as in git's index; a file that was
changed just now has none, since a further change within the clock's grain could not be told.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

GRAIN = 2.0  # seconds: the coarsest clock among file systems in use


class Digests:
    """Notes in a folder; without one nothing is remembered."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder

    def sha256(self, path: Path) -> str:
        """Of a file's contents."""

        def read() -> str:
            with path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()

        return self.note(path, "sha256", read)

    def note(self, path: Path, what: str, compute: Callable[[], Any]) -> Any:
        """`compute()`, a JSON value that depends on this file's contents alone, or what it was when the file was the same."""
        if self._folder is None:
            return compute()
        name = hashlib.sha256(f"{what}\0{path.absolute()}".encode()).hexdigest()[:32]
        note = self._folder / name[:2] / f"{name}.json"
        now = _state(path)
        try:
            known = json.loads(note.read_text())
            if known["state"] == now:
                return known["value"]
        except (OSError, ValueError, KeyError, TypeError):
            pass
        value = compute()
        if _state(path) == now and time.time() - path.stat().st_mtime > GRAIN:
            note.parent.mkdir(parents=True, exist_ok=True)
            partial = note.with_name(f".{uuid4().hex}")
            partial.write_text(json.dumps({"state": now, "value": value}))
            partial.replace(note)
        return value


def _state(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ino]
