"""Immutable artifacts: `<store>/artifacts/<kind>/<key>/`, with a manifest.json written last.

An artifact is written in a staging folder and renamed into place, so readers never see a partial one; what a killed process
left is removed by the next publisher. Every `find` verifies names and sizes of all files, and contents up to HASH_LIMIT. Those
of a store on S3 are in mirrored_artifacts.py.

A file that cannot be read is an error, never a missing file. A corrupted artifact counts as missing. It is moved to quarantine
only by a process that replaces it: one that holds its lock, publishes it or downloads it. Quarantine is
`<store>/quarantine/<kind>-<key>-<n>/`, with the reason in reason.txt. Only `trainshed gc` deletes it, and a process that has
mapped its files keeps its mapping.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from profiles.files import state_files
from profiles.files.state_files import make_folder, retried
from tasks.store import locks
from tasks.store.backends.backend import Backend
from tasks.store.backends.folder import FolderBackend
from tasks.store.manifest import NAME as MANIFEST
from tasks.store.manifest import ArtifactId as ArtifactId  # callers need both names
from tasks.store.manifest import Corrupted, Manifest
from tasks.store.staging import staging_folder

log = logging.getLogger(__name__)

HASH_LIMIT = 4 << 30  # bytes hashed by one `find`, about 2 s; the rest is verified by size
QUARANTINE = "quarantine"
REASON = "reason.txt"  # beside the files in quarantine
R = TypeVar("R")
Files = Mapping[str, int]  # sizes of an artifact's files in bytes, by name


@dataclass(frozen=True)
class Artifact:
    """Reference to an artifact; steps pass it on."""

    id: ArtifactId
    location: str = ""  # path or URI of its folder
    summary: dict[str, Any] = field(default_factory=dict)  # small facts about it, JSON
    seconds: float | None = field(default=None, compare=False)  # how long it took to make; None if unknown

    @property
    def kind(self) -> str:
        return self.id.kind

    @property
    def key(self) -> str:
        return self.id.key


@dataclass
class HashBudget:
    """Bytes that may still be hashed during a verification; files beyond it are verified by size."""

    remaining: int


class ArtifactStore(ABC):
    """Finds, publishes and locks artifacts.

    Args:
        backend: decides whether an artifact exists.
        folder: folder of this machine in which artifacts are made.
    """

    remote_uri = ""  # URI of the artifacts' folder in a remote store; empty if the store is local

    def __init__(self, backend: Backend, folder: FolderBackend) -> None:
        self._backend, self.folder = backend, folder
        self._held: dict[ArtifactId, locks.Lock] = {}  # those of this process

    def find(
        self, id: ArtifactId, hash_limit: int = HASH_LIMIT, sizes: Files | None = None
    ) -> Artifact | None:
        """The artifact, if it and everything it requires is complete.

        A corrupted artifact is not returned, with a warning that names the file; within its `lock` it is moved to quarantine.

        Args:
            hash_limit: bytes whose contents are verified; the rest is verified by size.
            sizes: its files, if they are already listed.

        Raises:
            OSError: a file or folder cannot be read, so it is unknown whether the artifact is complete.
        """
        manifest = self._verify_with_required(id, HashBudget(hash_limit), sizes)
        if manifest is None:
            return None
        return Artifact(id, self._backend.location(id.path), manifest.summary, manifest.seconds)

    def find_many(self, ids: Sequence[ArtifactId], hash_limit: int = HASH_LIMIT) -> list[Artifact | None]:
        """`find` for many artifacts, with a `hash_limit` for each."""
        return self._map(lambda id, sizes: self.find(id, hash_limit, sizes), ids)

    def expect(self, id: ArtifactId) -> Artifact:
        """A just published artifact, verified by size only. Raises RuntimeError if it does not exist."""
        artifact = self.find(id, hash_limit=0)
        if artifact is None:
            location = self._backend.location(id.path)
            raise RuntimeError(f"{location}: was published but is no longer in the store")
        return artifact

    @abstractmethod
    def path(self, artifact: Artifact, *, with_required: bool = True) -> Path:
        """The artifact's folder on this machine, downloaded if the store is remote.

        Args:
            with_required: also download the artifacts that it requires.

        Raises:
            FileNotFoundError: it is not in the store.
            Corrupted: a downloaded file differs from the manifest; the artifact was moved to quarantine, so the next run makes
                a new one.
        """

    @contextmanager
    def publish(
        self, id: ArtifactId, summary: Mapping[str, Any] | None = None, requires: Sequence[ArtifactId] = ()
    ) -> Iterator[Path]:
        """A new folder for an artifact's files, published at the end of the block.

        If the block raises, nothing is published. If another process publishes the same artifact first, these files are
        discarded.

        Args:
            summary: read at the end of the block, so the block may fill it in.
            requires: artifacts that this one points to.

        Raises:
            ValueError: an invalid kind or key, or the folder contains something other than regular files.
            LockLost: the block is within the artifact's `lock`, which another process took over meanwhile.
        """
        _ = id.path  # rejects an invalid name before the block does its work
        held = self._held.get(id)
        started = held.since if held else time.monotonic()
        with self._staging(id) as folder:
            yield folder
            seconds = round(time.monotonic() - started, 3)
            manifest = Manifest.of_folder(folder, id, summary or {}, requires, seconds)
            FolderBackend(folder).write(MANIFEST, manifest.to_bytes())
            self._check_lock(id)
            self._publish(folder, manifest)

    @contextmanager
    def lock(self, id: ArtifactId, watch: Callable[[], None] = lambda: None) -> Iterator[locks.Lock]:
        """Hold the lock of an artifact for the block; not reentrant.

        Call `find` once it is acquired: another process may have published the artifact meanwhile. The seconds recorded in
        the manifest of an artifact published within the block count from here.
        """
        with locks.acquire(self._backend, f"locks/{id.file_name}", watch=watch) as lock:
            self._held[id] = lock
            try:
                yield lock
            finally:
                del self._held[id]

    def is_locked(self, id: ArtifactId) -> bool:
        """Whether this thread holds the lock of an artifact."""
        held = self._held.get(id)
        return held is not None and held.thread == threading.get_ident()

    def quarantine(self, id: ArtifactId, reason: object) -> None:
        """Quarantine an artifact whose files are intact but contents invalid. Call within its `lock`."""
        with self._changing(id):
            self._quarantine(id, reason)

    def list_files(self, kind: str = "") -> dict[ArtifactId, dict[str, int]]:
        """Files with their sizes of all artifacts, or of those of a kind, from a single listing."""
        listed: dict[ArtifactId, dict[str, int]] = defaultdict(dict)
        for path, size in self._backend.files(f"artifacts/{kind}".rstrip("/")).items():
            parts = [*filter(None, [kind]), *path.split("/", 1 if kind else 2)]
            if len(parts) == 3:  # otherwise another program's
                listed[ArtifactId(*parts[:2])][parts[2]] = size
        return dict(listed)

    def remove(self, id: ArtifactId) -> None:
        """Remove an artifact, local copy included; no error if it does not exist."""
        self._backend.remove(id.path)

    @abstractmethod
    def evict(self, artifact: Artifact) -> None:
        """Remove the local copy of a remote store's artifact; no effect if the store is local."""

    def verify(self, id: ArtifactId, budget: HashBudget, sizes: Files | None = None) -> Manifest | None:
        """Manifest of a complete artifact; None if it is missing or still being uploaded. Changes nothing.

        Args:
            budget: bytes to hash, reduced by what is hashed; in an object store only sizes are compared.
            sizes: its files, if they are already listed.

        Raises:
            Corrupted: a file is missing or differs from the manifest.
            OSError: it cannot be read, so it is unknown whether it is complete.
        """
        if (data := self._backend.read(f"{id.path}/{MANIFEST}")) is None:
            return None
        sizes = self._backend.files(id.path) if sizes is None else sizes
        manifest = Manifest.from_bytes(data, id)
        manifest.verify_sizes(sizes)
        return manifest

    @abstractmethod
    def _publish(self, folder: Path, manifest: Manifest) -> None:
        """Move a finished folder into the store, unless the store has a complete artifact of that name."""

    def _restore(self, id: ArtifactId) -> Manifest | None:
        """Complete the interrupted publication of an artifact that is missing; None if there is none."""
        return None

    def _map(self, function: Callable[[ArtifactId, Files | None], R], ids: Sequence[ArtifactId]) -> list[R]:
        """Results in order; the function also takes an artifact's files, if they are listed."""
        return [function(id, None) for id in ids]

    def _staging(self, id: ArtifactId) -> AbstractContextManager[Path]:
        return staging_folder(self.folder.path("staging"), f"{id.kind}-{id.key[:12]}")

    def _check_lock(self, id: ArtifactId) -> None:
        """Raise LockLost if this process lost the artifact's lock, which it held."""
        if held := self._held.get(id):
            held.check()

    def _changing(self, id: ArtifactId) -> AbstractContextManager[locks.Lock]:
        """Hold the lock to upload, replace or move an artifact's files, for seconds to minutes."""
        return locks.acquire(self._backend, f"locks/{id.file_name}-files")

    def _find_manifest(
        self, id: ArtifactId, budget: HashBudget, sizes: Files | None = None
    ) -> Manifest | None:
        """As `verify`, for `find`: a corrupted artifact is missing, and quarantined within its lock."""
        try:
            manifest = self.verify(id, budget, sizes)
        except Corrupted as error:
            if not self.is_locked(id):
                log.warning("%s: %s; treated as missing", id, error)
                return None
            with self._changing(id):
                # Verified again under the lock: another process may have uploaded it again meanwhile.
                manifest = self._verify_or_quarantine(id, HashBudget(HASH_LIMIT))
        return manifest or self._restore(id)

    def _verify_with_required(
        self, id: ArtifactId, budget: HashBudget, sizes: Files | None = None
    ) -> Manifest | None:
        """Manifest of an artifact that is complete, with everything that it requires."""
        manifest = self._find_manifest(id, budget, sizes)
        required = manifest.requires if manifest else ()
        manifests = self._map(
            lambda other, listed: self._verify_with_required(other, budget, listed), required
        )
        for other, found in zip(required, manifests, strict=True):
            if found is None:
                log.warning("%s requires %s, which is missing", id, other)
                return None
        return manifest

    def _verify_or_quarantine(self, id: ArtifactId, budget: HashBudget) -> Manifest | None:
        """As `verify`, but quarantines a corrupted artifact. The caller holds its `_changing`."""
        try:
            return self.verify(id, budget)
        except Corrupted as error:
            self._quarantine(id, error)
            return None

    def _quarantine(self, id: ArtifactId, reason: object) -> None:
        """Move an artifact to quarantine, with a warning. The caller holds its `_changing`."""
        taken = {f"{QUARANTINE}/{file.partition('/')[0]}" for file in self._backend.files(QUARANTINE)}
        for number in count(1):
            folder = f"{QUARANTINE}/{id.file_name}-{number}"
            if folder in taken:
                continue
            try:
                self._backend.move(id.path, folder if self._is_folder(id) else f"{folder}/{id.key}")
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                continue  # another process has taken this name since
            self._backend.write(f"{folder}/{REASON}", f"{reason}\n".encode())
            log.warning("%s: %s; moved to %s", id, reason, self._backend.location(folder))
            return

    def _is_folder(self, id: ArtifactId) -> bool:
        """Whether what is in an artifact's place has room for a reason, as a file or a link has not."""
        return True


class LocalArtifacts(ArtifactStore):
    """Artifacts in a folder of this machine or of a shared file system."""

    def __init__(self, folder: FolderBackend) -> None:
        super().__init__(folder, folder)

    def path(self, artifact: Artifact, *, with_required: bool = True) -> Path:
        folder = self.folder.path(artifact.id.path)
        if not self.folder.exists(artifact.id.path):
            raise FileNotFoundError(f"{artifact.id} is not in the store: {folder}")
        return folder

    def evict(self, artifact: Artifact) -> None:
        pass

    def verify(self, id: ArtifactId, budget: HashBudget, sizes: Files | None = None) -> Manifest | None:
        manifest = super().verify(id, budget, sizes)
        if manifest:
            budget.remaining = manifest.verify_contents(self.folder.path(id.path), budget.remaining)
        elif self.folder.files(id.path):
            raise Corrupted(f"{MANIFEST} is missing")
        return manifest

    def place(self, folder: Path, manifest: Manifest, *, replace: bool) -> None:
        """Rename a finished folder into place, unless a complete artifact is there.

        Anything else that is there is moved to quarantine.

        Args:
            replace: also replace a complete artifact with another manifest.
        """
        id = manifest.id
        target = self.folder.path(id.path)
        retried(lambda: make_folder(target.parent))
        while True:
            try:
                os.rename(folder, target)
                return
            except OSError:
                if not state_files.exists(target, follow_symlinks=False):  # it failed for another reason
                    self.folder.move(str(folder), id.path)
                    return
            with self._changing(id):
                present = self._verify_or_quarantine(id, HashBudget(HASH_LIMIT))
                if present and (present == manifest or not replace):
                    log.info("%s was published by another process first; keeping its files", id)
                    return
                if state_files.exists(target, follow_symlinks=False):
                    reason = "differs from the store's artifact" if present else "has no files"
                    self._quarantine(id, reason)

    def _publish(self, folder: Path, manifest: Manifest) -> None:
        self.place(folder, manifest, replace=False)

    def _is_folder(self, id: ArtifactId) -> bool:
        return state_files.is_dir(self.folder.path(id.path), follow_symlinks=False)
