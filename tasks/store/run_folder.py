"""A run's mutable folder, `<store>/runs/<run>/`: lock, profile, checkpoints, metrics, logs, report.

The folder is local. If the store is remote, checkpoints are written there directly, and RunSync uploads the rest.
"""

from __future__ import annotations

import json
import logging
from itertools import count
from pathlib import Path, PurePosixPath

from tasks.store.backends import Backend, FolderBackend, ObjectBackend, checked_name
from tasks.store.sync import EXCLUDED, RunSync

log = logging.getLogger(__name__)

MARKER = "complete.json"  # in a checkpoint's folder, written last
IDENTITY = "run.json"


class RunFolder:
    """One run of a store, which need not exist yet."""

    def __init__(self, name: str, local: FolderBackend, remote: ObjectBackend | None) -> None:
        self.name = checked_name(name)
        self.path = local.path(f"runs/{name}")
        self._prefix = f"runs/{name}"
        self._local, self._remote = local, remote
        self._primary: Backend = remote or local

    @property
    def identity(self) -> str | None:
        """Identity of the run in the local folder; None if the folder is not a run."""
        try:
            return json.loads((self.path / IDENTITY).read_text())["identity"]
        except (OSError, ValueError, KeyError, TypeError):
            return None

    @property
    def stored_identity(self) -> str | None:
        """Identity of the run in the store; None if the store has no such run."""
        data = self._primary.read(f"{self._prefix}/{IDENTITY}")
        return json.loads(data).get("identity") if data else None

    def prepare(self, identity: str) -> Path:
        """The local folder of this run, created, or downloaded from the remote store, if this machine has none.

        A folder of another identity is moved to `<name>~N`, with a warning; nothing is overwritten.
        """
        if self.path.exists() and any(self.path.iterdir()) and self.identity != identity:
            log.warning(
                "run %s differs from the existing run of that name (model, data or training): moved that one to %s",
                self.name,
                self._move_aside(),
            )
        if self._remote:
            self._restore(self._remote, identity)
        self.path.mkdir(parents=True, exist_ok=True)
        if not (self.path / IDENTITY).exists():
            data = json.dumps({"identity": identity}, indent=1).encode()
            for backend in filter(None, (self._local, self._remote)):
                backend.write(f"{self._prefix}/{IDENTITY}", data)
        return self.path

    @property
    def checkpoints_location(self) -> Path | str:
        """Where training writes checkpoints: a path, or a URI if the store is remote."""
        if self._remote:
            return self._remote.location(f"{self._prefix}/checkpoints")
        return self.path / "checkpoints"

    def checkpoint_steps(self) -> list[int]:
        """Steps of the complete checkpoints, in ascending order."""
        files = map(PurePosixPath, self.files("checkpoints"))
        return sorted(int(file.parent.name.removeprefix("step_")) for file in files if file.name == MARKER)

    def is_remote(self, part: str) -> bool:
        """Whether a part of the run exists in the remote store only."""
        return self._remote is not None and part.startswith("checkpoints/")

    def files(self, part: str) -> dict[str, int]:
        """Sizes in bytes of the files of a part of the run in the store, by their paths relative to it."""
        return self._primary.files(f"{self._prefix}/{part}")

    def download(self, part: str) -> Path:
        """Local folder of a part of the run, downloaded if the store is remote and this machine has none."""
        folder = self.path / part
        if self._remote and not folder.exists():
            partial = folder.with_name(f".{folder.name}.partial")
            self._remote.download(f"{self._prefix}/{part}", list(self.files(part)), partial)
            partial.rename(folder)
        return folder

    def read_file(self, file: str) -> bytes | None:
        """Contents of a file of the run in the store; None if it does not exist."""
        return self._primary.read(f"{self._prefix}/{file}")

    def remove_file(self, file: str) -> None:
        """Remove a file of the run from the store; no error if it does not exist."""
        self._primary.remove(f"{self._prefix}/{file}")

    def sync(self, part: str = "") -> RunSync:
        """The upload of this folder, or of a part of it, to the remote store; does nothing if the store is local."""
        return RunSync(self.path / part, self._remote, f"{self._prefix}/{part}".rstrip("/"))

    def _restore(self, remote: ObjectBackend, identity: str) -> None:
        """Download the run if this machine has none; another identity is moved aside in the remote store."""
        stored = remote.read(f"{self._prefix}/{IDENTITY}")
        if stored is None:
            return
        if json.loads(stored).get("identity") != identity:
            names = (f"{self._prefix}~{number}" for number in count(1))
            remote.move(self._prefix, next(n for n in names if remote.read(f"{n}/{IDENTITY}") is None))
        elif not self.path.exists():
            names = [file for file in remote.files(self._prefix) if not file.startswith(EXCLUDED)]
            remote.download(self._prefix, names, self.path)
            log.info("run %s: downloaded from %s to resume here", self.name, remote.location(self._prefix))

    def _move_aside(self) -> Path:
        """Rename the local folder to `<name>~N`, the first that does not exist."""
        paths = (self.path.with_name(f"{self.name}~{number}") for number in count(1))
        return self.path.rename(next(path for path in paths if not path.exists()))
