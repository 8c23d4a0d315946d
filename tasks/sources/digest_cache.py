"""Cache of facts about local files (sha256, offsets), so that planning does not reread a corpus.

An entry is valid while the file's size, mtime and inode are unchanged, as in git's index. A file modified within the
clock's resolution is not cached: a second change in the same tick would go unnoticed.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from profiles.files import state_files
from tasks.keys import file_digest

CLOCK_RESOLUTION = 2.0  # seconds: the coarsest among file systems in use


class DigestCache:
    """Entries in a folder, one JSON file each; without a folder nothing is cached."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder

    def sha256(self, path: Path) -> str:
        return str(self.get(path, "sha256", lambda: file_digest(path)))

    def get(self, path: Path, what: str, compute: Callable[[], Any]) -> Any:
        """The cached value of `compute()`, a JSON value that depends only on the contents of the file."""
        if self._folder is None:
            return compute()
        name = hashlib.sha256(f"{what}\0{path.absolute()}".encode()).hexdigest()[:32]
        entry = self._folder / name[:2] / f"{name}.json"
        state = _state(path)
        try:
            cached = json.loads(entry.read_text())
            if cached["state"] == state:
                return cached["value"]
        except (OSError, ValueError, KeyError, TypeError):
            pass
        value = compute()
        if _state(path) == state and time.time() - path.stat().st_mtime > CLOCK_RESOLUTION:
            state_files.write(entry, json.dumps({"state": state, "value": value}).encode(), durable=False)
        return value


def _state(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ino]
