"""Mirrors a run's folder to a remote store: what has changed, each minute and at the end.

Checkpoints are not its concern, since they are written to the store directly. A file that cannot be copied now is copied
the next time; training never waits for it and never fails by it.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Self

from tasks.store.backends import Objects

log = logging.getLogger(__name__)

SECONDS = 60.0
# In the store already, an artifact's copy, and what only whoever promotes a model writes there (continual.py).
LEFT_OUT = ("checkpoints", "graphs", "standing.json")


class Mirror:
    """Copies a folder to below a name of a remote store; as a context manager beside the block, and once more at its end."""

    def __init__(self, folder: Path, remote: Objects | None, name: str, seconds: float = SECONDS) -> None:
        self._folder, self._remote, self._name, self._seconds = folder, remote, name, seconds
        self._copied: dict[str, tuple[int, int]] = {}  # size and time of each file when it was copied
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)

    def copy(self) -> None:
        """Copy what has changed since the last time; nothing where the store is no remote one."""
        if self._remote is None:
            return
        states = {}
        for path in self._folder.rglob("*"):
            name = path.relative_to(self._folder)
            if path.is_file() and not name.parts[0].startswith(LEFT_OUT):
                stat = path.stat()
                states[name.as_posix()] = (stat.st_size, stat.st_mtime_ns)
        changed = [name for name, state in states.items() if self._copied.get(name) != state]
        if changed:
            self._remote.upload(self._folder, changed, self._name)
        self._copied = states

    def _try(self) -> None:
        try:
            self.copy()
        except Exception as error:
            log.warning("%s is not mirrored to the store for now: %s", self._name, error)

    def _run(self) -> None:
        while not self._ended.wait(self._seconds):
            self._try()

    def __enter__(self) -> Self:
        if self._remote is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()
            self._try()
