"""A run's mutable folder, `<store>/runs/<run>/`: lock, profile, checkpoints, metrics, logs, report.

The folder is local. If the store is remote, checkpoints are written there directly, and RunSync uploads the rest.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path, PurePosixPath

from profiles.errors import ProfileError
from tasks.store.backends import Backend, FolderBackend, ObjectBackend, checked_name
from tasks.store.sync import EXCLUDED, RunSync

log = logging.getLogger(__name__)

MARKER = "complete.json"  # in a checkpoint's folder, written last
IDENTITY = "run.json"
REPLACED = re.compile(r"~\d+$")  # ends the name of a run that another one replaced
TRACES = ("checkpoints", "metrics.jsonl")  # what a run leaves in its folder
LOCK = "lock.json"  # what the run's references resolve to (tasks/resolve.py)


@dataclass(frozen=True)
class Parent:
    """The run, and the step of its checkpoint, that another run was forked from."""

    run: str
    identity: str
    step: int


class RunFolder:
    """One run of a store, which need not exist yet."""

    def __init__(self, name: str, local: FolderBackend, remote: ObjectBackend | None) -> None:
        self.name = name
        checked_name(REPLACED.sub("", name))
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

    @property
    def parent(self) -> Parent | None:
        """The run that this one was forked from; None if it was not."""
        data = self._primary.read(f"{self._prefix}/{IDENTITY}")
        parent = json.loads(data).get("parent") if data else None
        return Parent(**parent) if parent else None

    def prepare(self, identity: str, parent: Parent | None = None) -> Path:
        """The local folder of this run, created, or downloaded from the remote store, if this machine has none.

        A local copy of another run of that name is moved to `<name>~N`. Raises ProfileError for a folder with a run's files
        but without run.json.
        """
        local = self.identity
        if local is None and (found := [name for name in TRACES if (self.path / name).exists()]):
            reason = (
                f"{self.path} has {found[0]} but no {IDENTITY}; restore that file, or move the folder away"
            )
            raise ProfileError("name", self.name, reason)
        if local not in (None, identity):
            moved = self.path.rename(self.path.with_name(self._free_name()))
            log.warning("run %s: moved this machine's copy of another run to %s", self.name, moved)
        if self._remote:
            self._restore(self._remote, identity)
        self.path.mkdir(parents=True, exist_ok=True)
        if not (self.path / IDENTITY).exists():
            contents = {"identity": identity, **({"parent": asdict(parent)} if parent else {})}
            self.write(IDENTITY, json.dumps(contents, indent=1).encode())
        return self.path

    def move_aside(self) -> str:
        """Rename the run to `<name>~N`, the first name that is free, in the store and on this machine. Returns that name."""
        name = self._free_name()
        if self.path.exists():
            self.path.rename(self.path.with_name(name))
        if self._remote:
            self._remote.move(self._prefix, f"runs/{name}")
        return name

    def read(self, file: str) -> bytes | None:
        """Contents of one of the run's small files in the store; None if it does not exist."""
        return self._primary.read(f"{self._prefix}/{file}")

    def write(self, file: str, data: bytes) -> None:
        """Write a small file of the run, on this machine and in the store."""
        for backend in filter(None, (self._local, self._remote)):
            backend.write(f"{self._prefix}/{file}", data)

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

    def copy_checkpoint(self, step: int, target: RunFolder) -> None:
        """Copy a complete checkpoint into another run of the store, its marker last."""
        part = f"checkpoints/step_{step}"
        if self._remote:
            self._remote.copy(f"{self._prefix}/{part}", f"{target._prefix}/{part}", last=MARKER)
        else:
            _link_files(self.path / part, target.path / part)

    def remove_file(self, file: str) -> None:
        """Remove a file of the run from the store; no error if it does not exist."""
        self._primary.remove(f"{self._prefix}/{file}")

    def sync(self, part: str = "") -> RunSync:
        """The upload of this folder, or of a part of it, to the remote store; does nothing if the store is local."""
        return RunSync(self.path / part, self._remote, f"{self._prefix}/{part}".rstrip("/"))

    def _restore(self, remote: ObjectBackend, identity: str) -> None:
        """Download the run if this machine has none and the remote store has it."""
        if self.stored_identity == identity and self.identity is None:
            names = [file for file in remote.files(self._prefix) if not file.startswith(EXCLUDED)]
            remote.download(self._prefix, names, self.path)
            log.info("run %s: downloaded from %s to resume here", self.name, remote.location(self._prefix))

    def _free_name(self) -> str:
        """The first `<name>~N` that neither the store nor this machine has."""
        names = (f"{self.name}~{number}" for number in count(1))
        return next(
            name
            for name in names
            if not self.path.with_name(name).exists()
            and self._primary.read(f"runs/{name}/{IDENTITY}") is None
        )


def _link_files(source: Path, target: Path) -> None:
    """Copy a checkpoint's files by hard links, or by contents across file systems; its marker last."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    names = sorted(path.name for path in source.iterdir() if path.name != MARKER)
    for name in [*names, MARKER]:
        try:
            os.link(source / name, target / name)
        except OSError:  # another file system
            shutil.copyfile(source / name, target / name)
