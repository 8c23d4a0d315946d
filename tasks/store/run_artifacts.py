"""Artifacts that point into a run folder: a training's last checkpoint, an export.

The files stay in the mutable run folder; the artifact contains a manifest of them, `points-to.json`, so that they are verified
like any other artifact before they are used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from parallel.checkpoint.locations import MARKER
from profiles.files import run_files, state_files
from tasks.store.artifacts import HASH_LIMIT, Artifact, ArtifactId
from tasks.store.backends.folder import FolderBackend
from tasks.store.manifest import Corrupted, Manifest
from tasks.store.store import Store

log = logging.getLogger(__name__)

POINTER = "points-to.json"


def publish(store: Store, id: ArtifactId, run: str, part: str, summary: Mapping[str, Any]) -> Artifact:
    """Publish an artifact that points to one part of a run folder, such as `export`.

    Files that exist in the remote store only are recorded by size. Raises RuntimeError if there are no files.
    """
    folder = store.run_folder(run)
    if folder.is_remote(part):
        manifest = Manifest.of_listing(folder.files(part), id)
    else:
        manifest = Manifest.of_folder(folder.path / part, id, {}, ())
    if not manifest.files:
        raise RuntimeError(f"{folder.location(part)}: has no files; {id} is not published")
    with store.artifacts.publish(id, {**summary, "part": part}) as staging:
        (staging / POINTER).write_bytes(manifest.to_bytes())
    return store.artifacts.expect(id)


def find(store: Store, id: ArtifactId, run: str) -> Artifact | None:
    """The artifact, if the files that it points to are complete.

    If they are corrupted, a warning names the file. Within the artifact's lock, the artifact and the checkpoint that it points
    to are moved to quarantine, so that no run resumes from it.

    Raises:
        OSError: a file or folder cannot be read, so it is unknown whether the artifact is complete.
    """
    artifact = store.artifacts.find(id)
    if artifact is None:
        return None
    folder, part = store.run_folder(run), artifact.summary["part"]
    pointer = store.artifacts.path(artifact)
    try:
        manifest = _read_pointer(pointer, id)
        if folder.is_remote(part):
            manifest.verify_sizes(folder.files(part))
        else:
            manifest.verify_sizes(FolderBackend(folder.path / part).files(""))
            manifest.verify_contents(folder.path / part, HASH_LIMIT)
    except Corrupted as error:
        reason = f"{error} in {folder.location(part)}"
        if not store.artifacts.is_locked(id):
            log.warning("%s: %s; treated as missing", id, reason)
            return None
        if MARKER in folder.files(part):
            folder.quarantine_checkpoint(part, reason)
        store.artifacts.quarantine(id, reason)
        return None
    return artifact


def refresh(store: Store, kind: str, run: str, sha256: Callable[[Path], str]) -> None:
    """Download the part of a run folder that its latest artifact of a kind points to, unless it is there.

    Another machine may have published the artifact after the folder was downloaded.

    Args:
        sha256: of a local file.

    Raises:
        Corrupted, FileNotFoundError: the files in the remote store are not those of the artifact, either.
    """
    if not store.is_remote:
        return
    folder = store.run_folder(run)
    ids = [ArtifactId(kind, key) for key in folder.read_json(run_files.ARTIFACTS).get(kind, ())]
    found = filter(None, (store.artifacts.find(id, hash_limit=0) for id in ids))
    pointers = [(_read_pointer(store.artifacts.path(each), each.id), each.summary["part"]) for each in found]
    if not pointers:
        return
    manifest, part = max(pointers, key=lambda pointer: pointer[0].created)
    try:
        manifest.verify_sizes(FolderBackend(folder.path / part).files(""))
        for file in manifest.files:
            file.compare(sha256(folder.path / part / file.name))
    except Corrupted:
        folder.download(part, manifest)
        log.info("run %s: downloaded %s, which another machine has replaced", run, part)


def _read_pointer(folder: Path, id: ArtifactId) -> Manifest:
    """Manifest of the files that an artifact points to. Raises Corrupted if it is missing or invalid."""
    return Manifest.from_bytes(state_files.read(folder / POINTER) or b"", id)
