"""Artifacts of a store on S3, with a copy of those that this machine made or used in a local folder.

They are published to the local folder, then uploaded, manifest last; `path` downloads. A local copy is uploaded again only
after an interrupted upload, which `uploads/<kind>-<key>` records: any other copy that the store lacks was removed from the store,
or is in its quarantine.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

from tasks.store import locks
from tasks.store.artifacts import (
    HASH_LIMIT,
    Artifact,
    ArtifactId,
    ArtifactStore,
    Files,
    HashBudget,
    LocalArtifacts,
    R,
)
from tasks.store.backends.folder import FolderBackend
from tasks.store.backends.objects import ObjectBackend
from tasks.store.manifest import NAME as MANIFEST
from tasks.store.manifest import Corrupted, Manifest

log = logging.getLogger(__name__)

PARALLEL_REQUESTS = 16
# From this number of artifacts of a kind on, one listing of the kind is faster than one listing each.
LIST_WHOLE_KIND = 100


class MirroredArtifacts(ArtifactStore):
    """Artifacts in an object store.

    Args:
        remote: decides whether an artifact exists.
        local: the copies on this machine.
    """

    def __init__(self, remote: ObjectBackend, local: LocalArtifacts) -> None:
        super().__init__(remote, local.folder)
        self._remote, self._local = remote, local
        self.remote_uri = remote.location("artifacts")

    def path(self, artifact: Artifact, *, with_required: bool = True) -> Path:
        self._download(artifact.id, with_required)
        return self.folder.path(artifact.id.path)

    def remove(self, id: ArtifactId) -> None:
        super().remove(id)
        self._local.remove(id)

    def evict(self, artifact: Artifact) -> None:
        self._local.remove(artifact.id)

    def quarantine(self, id: ArtifactId, reason: object) -> None:
        with self._changing(id):
            self.folder.remove(_upload_record(id))
            self._quarantine(id, reason)

    def _map(self, function: Callable[[ArtifactId, Files | None], R], ids: Sequence[ArtifactId]) -> list[R]:
        listed: dict[ArtifactId, Files] = {}
        for kind, count in Counter(id.kind for id in ids).items():
            if count >= LIST_WHOLE_KIND:
                sizes = self.list_files(kind)
                listed |= {id: sizes.get(id, {}) for id in ids if id.kind == kind}
        return _in_threads(lambda id: function(id, listed.get(id)), ids)

    def _publish(self, folder: Path, manifest: Manifest) -> None:
        id = manifest.id
        with self._changing(id) as lock:
            if self._verify_or_quarantine(id, HashBudget(0)):
                log.info("%s was published by another process first; keeping its files", id)
                return
            self.folder.write(_upload_record(id), manifest.to_bytes())
            self._local.place(folder, manifest, replace=True)
            self._upload(lock, manifest)

    def _upload(self, lock: locks.Lock, manifest: Manifest) -> None:
        """Upload a local artifact, manifest last. `lock` is its `_changing`."""
        id = manifest.id
        self._remote.upload(self.folder.path(id.path), [file.name for file in manifest.files], id.path)
        try:
            lock.check()
            self._check_lock(id)
        except locks.LockLost:
            self.folder.remove(_upload_record(id))
            raise
        self._remote.write(f"{id.path}/{MANIFEST}", manifest.to_bytes())
        self.folder.remove(_upload_record(id))

    def _restore(self, id: ArtifactId) -> Manifest | None:
        """Repeat the interrupted upload of an artifact that the remote store lacks."""
        record = _upload_record(id)
        if self.folder.read(record) is None:
            return None
        with self._changing(id) as lock:
            found = self._verify_or_quarantine(id, HashBudget(0))
            manifest = None if found else self._verify_copy(id)
            if manifest and manifest.to_bytes() == self.folder.read(record):
                log.info("%s is missing in the store; uploading the local copy", id)
                self._upload(lock, manifest)
                return manifest
            self.folder.remove(record)
            return found

    def _verify_copy(self, id: ArtifactId) -> Manifest | None:
        """Manifest of this machine's copy of an artifact; None if that is missing or corrupted."""
        try:
            return self._local.verify(id, HashBudget(HASH_LIMIT))
        except Corrupted as error:
            log.warning("%s: %s in this machine's copy, which is not used", id, error)
            return None

    def _download(self, id: ArtifactId, with_required: bool = True) -> None:
        """Download an artifact unless the local copy is complete, and optionally what it requires."""
        manifest, data = self._read_manifest(id)
        if self._verify_copy(id) != manifest:
            try:
                self._download_files(manifest, data)
            except (Corrupted, FileNotFoundError):  # only sizes had been compared; or it is being replaced
                with nullcontext() if self.is_locked(id) else self.lock(id):
                    self._download_or_quarantine(id)
        _in_threads(self._download, manifest.requires if with_required else ())

    def _download_or_quarantine(self, id: ArtifactId) -> None:
        """Retry the download of a corrupted artifact; if still corrupted, quarantine the store's copy."""
        with self._changing(id):
            try:
                self._download_files(*self._read_manifest(id))
            except Corrupted as error:
                self._quarantine(id, error)
                raise

    def _read_manifest(self, id: ArtifactId) -> tuple[Manifest, bytes]:
        """An artifact's manifest in the remote store, and its bytes. Raises FileNotFoundError, Corrupted."""
        if (data := self._remote.read(f"{id.path}/{MANIFEST}")) is None:
            raise FileNotFoundError(f"{id} is not in the store: {self._remote.location(id.path)}")
        return Manifest.from_bytes(data, id), data

    def _download_files(self, manifest: Manifest, data: bytes) -> None:
        """Download the files of a manifest (`data`: its bytes). Raises Corrupted if a file differs from it."""
        files = {file.name: file for file in manifest.files}
        with self._staging(manifest.id) as folder:
            self._remote.download(
                manifest.id.path, list(files), folder, lambda name: files[name].verify(folder)
            )
            FolderBackend(folder).write(MANIFEST, data)
            self._local.place(folder, manifest, replace=True)


def _in_threads(function: Callable[[ArtifactId], R], ids: Sequence[ArtifactId]) -> list[R]:
    """Results in order, of concurrent requests if there are several."""
    if len(ids) < 2:
        return [function(id) for id in ids]
    with ThreadPoolExecutor(PARALLEL_REQUESTS) as pool:
        return list(pool.map(function, ids))


def _upload_record(id: ArtifactId) -> str:
    """Name in the local folder of the record of an unfinished upload: the artifact's manifest."""
    return f"uploads/{id.file_name}"
