"""Artifacts in one backend: the only place that verifies and removes them."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from tasks.store.backends import FolderBackend, ObjectBackend, checked_name
from tasks.store.manifest import NAME as MANIFEST
from tasks.store.manifest import Corrupted, Manifest

log = logging.getLogger(__name__)


@dataclass
class HashBudget:
    """Bytes that may still be hashed during a verification; files beyond it are verified by size."""

    remaining: int


def artifact_path(kind: str, key: str) -> str:
    """Path of an artifact's folder in a backend. Raises ValueError for an invalid kind or key."""
    return f"artifacts/{checked_name(kind)}/{checked_name(key)}"


class Replica:
    """The artifacts of a backend: a store's local folder, or its remote prefix."""

    def __init__(self, backend: FolderBackend | ObjectBackend) -> None:
        self.backend = backend

    def manifest_bytes(self, kind: str, key: str) -> bytes | None:
        """Contents of an artifact's manifest.json; None if there is none."""
        return self.backend.read(f"{artifact_path(kind, key)}/{MANIFEST}")

    def verify(
        self, kind: str, key: str, budget: HashBudget, sizes: Mapping[str, int] | None = None
    ) -> Manifest | None:
        """Manifest of a complete artifact. A corrupted one is removed, with a warning that names the file.

        Args:
            budget: bytes to hash, reduced by what is hashed; in an object store only sizes are compared.
            sizes: the artifact's files if they have been listed already.

        Returns:
            None if the artifact is missing, corrupted, or still being uploaded.
        """
        data = self.manifest_bytes(kind, key)
        path = artifact_path(kind, key)
        sizes = self.backend.files(path) if sizes is None else sizes
        if data is None and (not sizes or isinstance(self.backend, ObjectBackend)):
            return None
        try:
            if data is None:
                raise Corrupted(f"{MANIFEST} is missing")
            manifest = Manifest.from_bytes(data, kind, key)
            manifest.verify_sizes(sizes)
            if isinstance(self.backend, FolderBackend):
                budget.remaining = manifest.verify_contents(self.backend.path(path), budget.remaining)
            return manifest
        except Corrupted as error:
            # Unless another process has published it again in the meantime.
            if self.manifest_bytes(kind, key) == data:
                log.warning("%s %s: %s; removed, to be made again", kind, key, error)
                self.remove(kind, key)
            return None

    def remove(self, kind: str, key: str) -> None:
        """Remove an artifact; no error if it does not exist."""
        self.backend.remove(artifact_path(kind, key))

    def list_kind(self, kind: str) -> dict[str, dict[str, int]]:
        """Files and their sizes of all artifacts of a kind, by key, from a single listing."""
        artifacts: dict[str, dict[str, int]] = defaultdict(dict)
        for path, size in self.backend.files(f"artifacts/{checked_name(kind)}").items():
            key, _, file = path.partition("/")
            artifacts[key][file] = size
        return artifacts
