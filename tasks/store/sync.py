"""Uploads a run folder to a remote store: changed files, once a minute and at the end.

Checkpoints are excluded: training writes them to the store directly. A file that fails to upload is retried with the next
sync; training neither waits for it nor fails.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Self

from tasks.store.backends import ObjectBackend

log = logging.getLogger(__name__)

INTERVAL = 60.0  # seconds
# Already in the store; a copy of an artifact; written only by the promotion of a model (continual.py).
EXCLUDED = ("checkpoints", "graphs", "standing.json")


class RunSync:
    """Context manager that uploads a folder in the background during the block, and at its end; without `remote`, nothing."""

    def __init__(
        self, folder: Path, remote: ObjectBackend | None, name: str, interval: float = INTERVAL
    ) -> None:
        self._folder, self._remote, self._name, self._interval = folder, remote, name, interval
        self._uploaded: dict[str, tuple[int, int]] = {}  # size and mtime of each file when it was uploaded
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="run-sync", daemon=True)

    def upload(self) -> None:
        """Upload the files that changed since the last call."""
        if self._remote is None:
            return
        states = {}
        for path in self._folder.rglob("*"):
            name = path.relative_to(self._folder)
            if path.is_file() and not name.parts[0].startswith(EXCLUDED):
                stat = path.stat()
                states[name.as_posix()] = (stat.st_size, stat.st_mtime_ns)
        if changed := [name for name, state in states.items() if self._uploaded.get(name) != state]:
            self._remote.upload(self._folder, changed, self._name)
        self._uploaded = states

    def _try_upload(self) -> None:
        try:
            self.upload()
        except Exception as error:
            log.warning("%s: cannot sync with the store: %s; retrying", self._name, error)

    def _run(self) -> None:
        while not self._stopped.wait(self._interval):
            self._try_upload()

    def __enter__(self) -> Self:
        if self._remote is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join()
            self._try_upload()
