"""Artifacts that point into a run folder: a training's last checkpoint, an export.

The files stay in the mutable run folder; the artifact contains a manifest of them, `points-to.json`, so that they are verified
like any other artifact before they are used.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from tasks.store.artifacts import HASH_LIMIT, Artifact
from tasks.store.backends import FolderBackend
from tasks.store.manifest import Corrupted, Manifest
from tasks.store.run_folder import MARKER
from tasks.store.store import Store

log = logging.getLogger(__name__)

POINTER = "points-to.json"


def publish(store: Store, kind: str, key: str, run: str, part: str, summary: Mapping[str, Any]) -> Artifact:
    """Publish an artifact that points to one part of a run folder, such as `export`.

    Files that exist in the remote store only are recorded by size.
    """
    folder = store.run_folder(run)
    if folder.is_remote(part):
        manifest = Manifest.of_listing(folder.files(part), kind, key)
    else:
        manifest = Manifest.of_folder(folder.path / part, kind, key, {}, ())
    with store.artifacts.publish(kind, key, {**summary, "part": part}) as staging:
        (staging / POINTER).write_bytes(manifest.to_bytes())
    return store.artifacts.expect(kind, key)


def find(store: Store, kind: str, key: str, run: str) -> Artifact | None:
    """The artifact, if the files that it points to are complete; if they are not, it is removed, with a warning."""
    artifact = store.artifacts.find(kind, key)
    if artifact is None:
        return None
    folder, part = store.run_folder(run), artifact.summary["part"]
    target = folder.path / part
    try:
        manifest = Manifest.from_bytes((store.artifacts.path(artifact) / POINTER).read_bytes(), kind, key)
        if folder.is_remote(part):
            manifest.verify_sizes(folder.files(part))
        else:
            manifest.verify_sizes(FolderBackend(target).files(""))
            manifest.verify_contents(target, HASH_LIMIT)
    except Corrupted as error:
        log.warning("%s: %s in %s; it will be made again", kind, error, target)
        folder.remove_file(f"{part}/{MARKER}")  # no run resumes from a corrupted checkpoint
        store.artifacts.remove(kind, key)
        return None
    return artifact
