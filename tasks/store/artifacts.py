"""Immutable artifacts: `<store>/artifacts/<kind>/<key>/`, with a manifest.json written last.

An artifact is written in a staging folder and renamed into place, so readers never see a partial one; what a killed process
left is removed by the next publisher. Every `find` verifies names and sizes of all files, and contents up to HASH_LIMIT. In
a store on S3, artifacts are published to a local folder of the same layout, then uploaded, manifest last; `path` downloads.
A local copy is uploaded again only after an interrupted upload, which `uploads/<kind>-<key>` records: any other copy that the
store lacks was removed from the store, or is in its quarantine.

A file that cannot be read is an error, never a missing file. A corrupted artifact counts as missing. It is moved to quarantine
only by a process that replaces it: one that holds its lock, publishes it or downloads it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from profiles.state_files import make_folder, retried
from tasks.store import locks
from tasks.store.backend_artifacts import BackendArtifacts, HashBudget, artifact_path
from tasks.store.backends.folder import FolderBackend
from tasks.store.backends.objects import ObjectBackend
from tasks.store.manifest import NAME as MANIFEST
from tasks.store.manifest import Corrupted, Manifest
from tasks.store.staging import staging_folder

log = logging.getLogger(__name__)

HASH_LIMIT = 4 << 30  # bytes hashed by one `find`, about 2 s; the rest is verified by size
PARALLEL_REQUESTS = 16  # to a remote store
# From this number of artifacts of a kind on, one listing of the kind is faster than one listing each.
LIST_WHOLE_KIND = 100
T = TypeVar("T")
R = TypeVar("R")
Remote = BackendArtifacts[ObjectBackend]


@dataclass(frozen=True)
class Artifact:
    """Reference to an artifact; steps pass it on."""

    kind: str  # which step made it
    key: str  # hash of everything that determines its contents
    location: str  # path or URI of its folder
    summary: dict[str, Any]  # small facts about it, JSON
    seconds: float | None = field(default=None, compare=False)  # how long it took to make; None if unknown

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Artifact:
        return cls(**value)


@dataclass(frozen=True)
class _Held:
    """An artifact's lock that this process holds."""

    lock: locks.Lock
    thread: int
    since: float  # time.monotonic()


class ArtifactStore:
    """Finds, publishes, locks and downloads artifacts.

    Args:
        local: folder of the store, or of this machine's copy if the store is remote.
        remote: the remote store, if any; it decides whether an artifact exists.
    """

    def __init__(self, local: FolderBackend, remote: ObjectBackend | None) -> None:
        self._folder = local
        self._local = BackendArtifacts(local)
        self._remote = BackendArtifacts(remote) if remote else None
        self._primary = self._remote or self._local
        self._held: dict[tuple[str, str], _Held] = {}  # locks of (kind, key)

    @property
    def remote_uri(self) -> str:
        """URI of the artifacts' folder in a remote store; empty if the store is local."""
        return self._remote.backend.location("artifacts") if self._remote else ""

    def find(
        self, kind: str, key: str, hash_limit: int = HASH_LIMIT, sizes: Mapping[str, int] | None = None
    ) -> Artifact | None:
        """The artifact, if it and everything it requires is complete.

        A corrupted artifact is not returned, with a warning that names the file; within its `lock` it is moved to quarantine.

        Args:
            hash_limit: bytes whose contents are verified; the rest is verified by size.
            sizes: its files, if they are already listed.

        Raises:
            OSError: a file or folder cannot be read, so it is unknown whether the artifact is complete.
        """
        manifest = self._verify_with_required(kind, key, HashBudget(hash_limit), sizes)
        if manifest is None:
            return None
        location = self._primary.backend.location(artifact_path(kind, key))
        return Artifact(kind, key, location, manifest.summary, manifest.seconds)

    def find_many(
        self, kind: str, keys: Sequence[str], hash_limit: int = HASH_LIMIT
    ) -> list[Artifact | None]:
        """`find` for many artifacts of a kind, with a `hash_limit` for each."""
        sizes = self._list_large_kinds([(kind, key) for key in keys])
        return self._map(lambda key: self.find(kind, key, hash_limit, sizes.get((kind, key))), keys)

    def expect(self, kind: str, key: str) -> Artifact:
        """A just published artifact, verified by size only. Raises RuntimeError if it does not exist."""
        artifact = self.find(kind, key, hash_limit=0)
        if artifact is None:
            location = self._primary.backend.location(artifact_path(kind, key))
            raise RuntimeError(f"{location}: was published but is no longer in the store")
        return artifact

    def path(self, artifact: Artifact, *, with_required: bool = True) -> Path:
        """The artifact's folder on this machine, downloaded if the store is remote.

        Args:
            with_required: also download the artifacts that it requires.

        Raises:
            FileNotFoundError: it is not in the store.
            Corrupted: a downloaded file differs from the manifest; the artifact was moved to quarantine, so the next run makes
                a new one.
        """
        folder = self._folder.path(artifact_path(artifact.kind, artifact.key))
        if self._remote:
            self._download(self._remote, artifact.kind, artifact.key, with_required)
        elif not self._folder.exists(artifact_path(artifact.kind, artifact.key)):
            raise FileNotFoundError(f"{artifact.kind} {artifact.key} is not in the store: {folder}")
        return folder

    @contextmanager
    def publish(
        self,
        kind: str,
        key: str,
        summary: Mapping[str, Any] | None = None,
        requires: Sequence[Mapping[str, str]] = (),
    ) -> Iterator[Path]:
        """A new folder for an artifact's files, published at the end of the block.

        If the block raises, nothing is published. If another process publishes the same artifact first, these files are
        discarded.

        Args:
            summary: read at the end of the block, so the block may fill it in.
            requires: {kind, key} of each artifact that this one points to.

        Raises:
            ValueError: an invalid kind or key, or the folder contains something other than regular files.
            LockLost: the block is within the artifact's `lock`, which another process took over meanwhile.
        """
        artifact_path(kind, key)  # rejects an invalid name before the block does its work
        held = self._held.get((kind, key))
        started = held.since if held else time.monotonic()
        with self._staging(kind, key) as folder:
            yield folder
            seconds = round(time.monotonic() - started, 3)
            manifest = Manifest.of_folder(folder, kind, key, summary or {}, requires, seconds)
            FolderBackend(folder).write(MANIFEST, manifest.to_bytes())
            self._check_lock(kind, key)
            if self._remote:
                self._publish_remotely(self._remote, folder, kind, key, manifest)
            else:
                self._move_into_place(folder, kind, key)

    @contextmanager
    def lock(self, kind: str, key: str, watch: Callable[[], None] = lambda: None) -> Iterator[locks.Lock]:
        """Hold the lock of an artifact for the block; not reentrant.

        Call `find` once it is acquired: another process may have published the artifact meanwhile. The seconds recorded in
        the manifest of an artifact published within the block count from here.
        """
        with locks.acquire(self._primary.backend, f"locks/{kind}-{key}", watch=watch) as lock:
            self._held[kind, key] = _Held(lock, threading.get_ident(), time.monotonic())
            try:
                yield lock
            finally:
                del self._held[kind, key]

    def is_locked(self, kind: str, key: str) -> bool:
        """Whether this thread holds the lock of an artifact."""
        held = self._held.get((kind, key))
        return held is not None and held.thread == threading.get_ident()

    def quarantine(self, kind: str, key: str, reason: object) -> None:
        """Quarantine an artifact whose files are intact but contents invalid. Call within its `lock`."""
        with self._primary.changing(kind, key):
            self._folder.remove(_upload_record(kind, key))
            self._primary.quarantine(kind, key, reason)

    def list_files(self) -> dict[tuple[str, str], dict[str, int]]:
        """Files with their sizes of everything below `artifacts`, by kind and key."""
        listed: dict[tuple[str, str], dict[str, int]] = {}
        for path, size in self._primary.backend.files("artifacts").items():
            if path.count("/") >= 2:  # otherwise another program's
                kind, key, file = path.split("/", 2)
                listed.setdefault((kind, key), {})[file] = size
        return listed

    def remove(self, kind: str, key: str) -> None:
        """Remove an artifact, local copy included; no error if it does not exist."""
        for replica in {self._primary, self._local}:
            replica.remove(kind, key)

    def evict(self, artifact: Artifact) -> None:
        """Remove the local copy of a remote store's artifact; no effect if the store is local."""
        if self._remote:
            self._local.remove(artifact.kind, artifact.key)

    def _staging(self, kind: str, key: str) -> AbstractContextManager[Path]:
        return staging_folder(self._folder.path("staging"), f"{kind}-{key[:12]}")

    def _check_lock(self, kind: str, key: str) -> None:
        """Raise LockLost if this process lost the artifact's lock, which it held."""
        if held := self._held.get((kind, key)):
            held.lock.check()

    def _verify(
        self, kind: str, key: str, budget: HashBudget, sizes: Mapping[str, int] | None = None
    ) -> Manifest | None:
        """Manifest of an artifact that is complete."""
        try:
            manifest = self._primary.verify(kind, key, budget, sizes)
        except Corrupted as error:
            if not self.is_locked(kind, key):
                log.warning("%s %s: %s; treated as missing", kind, key, error)
                return None
            with self._primary.changing(kind, key):
                # Verified again under the lock: another process may have uploaded it again meanwhile.
                manifest = self._primary.verify_or_quarantine(kind, key, HashBudget(HASH_LIMIT))
        return manifest or self._restore_upload(kind, key)

    def _verify_with_required(
        self, kind: str, key: str, budget: HashBudget, sizes: Mapping[str, int] | None = None
    ) -> Manifest | None:
        """Manifest of an artifact that is complete, with everything that it requires."""
        manifest = self._verify(kind, key, budget, sizes)
        required = manifest.requires if manifest else ()
        listed = self._list_large_kinds(required)
        manifests = self._map(
            lambda other: self._verify_with_required(*other, budget, listed.get(other)), required
        )
        for other, found in zip(required, manifests, strict=True):
            if found is None:
                log.warning("%s %s requires %s %s, which is missing", kind, key, *other)
                return None
        return manifest

    def _list_large_kinds(
        self, artifacts: Sequence[tuple[str, str]]
    ) -> dict[tuple[str, str], dict[str, int]]:
        """Files of artifacts whose kinds are listed as a whole (LIST_WHOLE_KIND); empty if the store is local."""
        listed: dict[tuple[str, str], dict[str, int]] = {}
        for kind, count in Counter(kind for kind, _ in artifacts).items():
            if self._remote and count >= LIST_WHOLE_KIND:
                sizes = self._remote.list_kind(kind)
                listed |= {(kind, key): sizes.get(key, {}) for other, key in artifacts if other == kind}
        return listed

    def _map(self, function: Callable[[T], R], values: Sequence[T]) -> list[R]:
        """Results in order; concurrent requests if the store is remote."""
        if self._remote is None or len(values) < 2:
            return [function(value) for value in values]
        with ThreadPoolExecutor(PARALLEL_REQUESTS) as pool:
            return list(pool.map(function, values))

    def _move_into_place(self, folder: Path, kind: str, key: str, manifest: Manifest | None = None) -> None:
        """Rename a finished folder into place, unless a complete artifact (of `manifest`, if given) is there.

        Anything else that is there is moved to quarantine.
        """
        path = artifact_path(kind, key)
        target = self._folder.path(path)
        retried(lambda: make_folder(target.parent))
        while True:
            try:
                os.rename(folder, target)
                return
            except OSError:
                if not os.path.lexists(target):  # the rename failed for another reason than what is there
                    self._folder.move(str(folder), path)
                    return
            with self._local.changing(kind, key):
                present = self._local.verify_or_quarantine(kind, key, HashBudget(HASH_LIMIT))
                if present and manifest in (None, present):
                    log.info("%s %s was published by another process first; keeping its files", kind, key)
                    return
                if os.path.lexists(target):
                    reason = "differs from the store's artifact" if present else "has no files"
                    self._local.quarantine(kind, key, reason)

    def _publish_remotely(
        self, remote: Remote, folder: Path, kind: str, key: str, manifest: Manifest
    ) -> None:
        """Replace the local copy by a finished folder and upload it, unless the store has the artifact."""
        with remote.changing(kind, key) as lock:
            if remote.verify_or_quarantine(kind, key, HashBudget(0)):
                log.info("%s %s was published by another process first; keeping its files", kind, key)
                return
            self._folder.write(_upload_record(kind, key), manifest.to_bytes())
            self._move_into_place(folder, kind, key, manifest)
            self._upload(remote, lock, kind, key, manifest)

    def _upload(self, remote: Remote, lock: locks.Lock, kind: str, key: str, manifest: Manifest) -> None:
        """Upload a local artifact, manifest last. The caller holds the remote `changing` lock."""
        path = artifact_path(kind, key)
        remote.backend.upload(self._folder.path(path), [file.name for file in manifest.files], path)
        try:
            lock.check()
            self._check_lock(kind, key)
        except locks.LockLost:
            self._folder.remove(_upload_record(kind, key))
            raise
        remote.backend.write(f"{path}/{MANIFEST}", manifest.to_bytes())
        self._folder.remove(_upload_record(kind, key))

    def _restore_upload(self, kind: str, key: str) -> Manifest | None:
        """Repeat the interrupted upload of an artifact that the remote store lacks."""
        record = _upload_record(kind, key)
        if self._remote is None or self._folder.read(record) is None:
            return None
        with self._remote.changing(kind, key) as lock:
            found = self._remote.verify_or_quarantine(kind, key, HashBudget(0))
            manifest = None if found else self._verify_local(kind, key)
            if manifest and manifest.to_bytes() == self._folder.read(record):
                log.info("%s %s is missing in the store; uploading the local copy", kind, key)
                self._upload(self._remote, lock, kind, key, manifest)
                return manifest
            self._folder.remove(record)
            return found

    def _verify_local(self, kind: str, key: str) -> Manifest | None:
        """Manifest of this machine's copy of an artifact; None if that is missing or corrupted."""
        try:
            return self._local.verify(kind, key, HashBudget(HASH_LIMIT))
        except Corrupted as error:
            log.warning("%s %s: %s in this machine's copy, which is not used", kind, key, error)
            return None

    def _download(self, remote: Remote, kind: str, key: str, with_required: bool = True) -> None:
        """Download an artifact unless the local copy is complete, and optionally what it requires."""
        data = self._remote_manifest(remote, kind, key)
        manifest = Manifest.from_bytes(data, kind, key)
        if self._verify_local(kind, key) != manifest:
            try:
                self._download_files(remote, kind, key, manifest, data)
            except (Corrupted, FileNotFoundError):  # only sizes had been compared; or it is being replaced
                with nullcontext() if self.is_locked(kind, key) else self.lock(kind, key):
                    self._download_or_quarantine(remote, kind, key)
        self._map(lambda other: self._download(remote, *other), manifest.requires if with_required else ())

    def _download_or_quarantine(self, remote: Remote, kind: str, key: str) -> None:
        """Retry the download of a corrupted artifact; if still corrupted, quarantine the store's copy."""
        with remote.changing(kind, key):
            data = self._remote_manifest(remote, kind, key)
            try:
                self._download_files(remote, kind, key, Manifest.from_bytes(data, kind, key), data)
            except Corrupted as error:
                remote.quarantine(kind, key, error)
                raise

    def _remote_manifest(self, remote: Remote, kind: str, key: str) -> bytes:
        """Contents of an artifact's manifest in the remote store. Raises FileNotFoundError if there is none."""
        data = remote.manifest_bytes(kind, key)
        if data is None:
            where = remote.backend.location(artifact_path(kind, key))
            raise FileNotFoundError(f"{kind} {key} is not in the store: {where}")
        return data

    def _download_files(self, remote: Remote, kind: str, key: str, manifest: Manifest, data: bytes) -> None:
        """Download the files of a manifest (`data`: its bytes). Raises Corrupted if a file differs from it."""
        files = {file.name: file for file in manifest.files}
        with self._staging(kind, key) as folder:
            path = artifact_path(kind, key)
            remote.backend.download(path, list(files), folder, lambda name: files[name].verify(folder))
            FolderBackend(folder).write(MANIFEST, data)
            self._move_into_place(folder, kind, key, manifest)


def _upload_record(kind: str, key: str) -> str:
    """Name in the local folder of the record of an unfinished upload: the artifact's manifest."""
    return f"uploads/{kind}-{key}"
