"""Artifacts in one backend: the only code that verifies them and moves corrupted ones to quarantine.

Quarantine is `<store>/quarantine/<kind>-<key>-<n>/`, with the reason in reason.txt. Only `trainshed gc` deletes them, and a
process that has mapped them keeps its mapping.
"""

from __future__ import annotations

import errno
import logging
from collections import defaultdict
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import count
from typing import Generic, TypeVar

from tasks.store import locks
from tasks.store.backends.backend import checked_name
from tasks.store.backends.folder import FolderBackend
from tasks.store.backends.objects import ObjectBackend
from tasks.store.manifest import NAME as MANIFEST
from tasks.store.manifest import Corrupted, Manifest

log = logging.getLogger(__name__)

QUARANTINE = "quarantine"
REASON = "reason.txt"  # beside the files in quarantine
B = TypeVar("B", FolderBackend, ObjectBackend)


@dataclass
class HashBudget:
    """Bytes that may still be hashed during a verification; files beyond it are verified by size."""

    remaining: int


def artifact_path(kind: str, key: str) -> str:
    """Path of an artifact's folder in a backend. Raises ValueError for an invalid kind or key."""
    return f"artifacts/{checked_name(kind)}/{checked_name(key)}"


class BackendArtifacts(Generic[B]):
    """The artifacts of a backend: a store's local folder, or its remote prefix."""

    def __init__(self, backend: B) -> None:
        self.backend: B = backend

    def manifest_bytes(self, kind: str, key: str) -> bytes | None:
        """Contents of an artifact's manifest.json; None if there is none."""
        return self.backend.read(f"{artifact_path(kind, key)}/{MANIFEST}")

    def verify(
        self, kind: str, key: str, budget: HashBudget, sizes: Mapping[str, int] | None = None
    ) -> Manifest | None:
        """Manifest of a complete artifact. Changes nothing.

        Args:
            budget: bytes to hash, reduced by what is hashed; in an object store only sizes are compared.
            sizes: the artifact's files if they have been listed already.

        Returns:
            None if the artifact is missing or still being uploaded.

        Raises:
            Corrupted: a file is missing or differs from the manifest.
            OSError: it cannot be read, so it is unknown whether it is complete.
        """
        data = self.manifest_bytes(kind, key)
        path = artifact_path(kind, key)
        sizes = self.backend.files(path) if sizes is None else sizes
        if data is None and (not sizes or isinstance(self.backend, ObjectBackend)):
            return None
        if data is None:
            raise Corrupted(f"{MANIFEST} is missing")
        manifest = Manifest.from_bytes(data, kind, key)
        manifest.verify_sizes(sizes)
        if isinstance(self.backend, FolderBackend):
            budget.remaining = manifest.verify_contents(self.backend.path(path), budget.remaining)
        return manifest

    def verify_or_quarantine(self, kind: str, key: str, budget: HashBudget) -> Manifest | None:
        """As `verify`, but quarantines a corrupted artifact, with a warning. The caller holds `changing`."""
        try:
            return self.verify(kind, key, budget)
        except Corrupted as error:
            self.quarantine(kind, key, error)
            return None

    def quarantine(self, kind: str, key: str, reason: object) -> None:
        """Move an artifact to quarantine, with a warning that gives the reason. The caller holds `changing`."""
        path = artifact_path(kind, key)
        place = self.backend.path(path) if isinstance(self.backend, FolderBackend) else None
        is_file = place is not None and (place.is_symlink() or not place.is_dir())  # has no room for a reason
        taken = {f"{QUARANTINE}/{file.partition('/')[0]}" for file in self.backend.files(QUARANTINE)}
        for number in count(1):
            folder = f"{QUARANTINE}/{kind}-{key}-{number}"
            if folder in taken:
                continue
            try:
                self.backend.move(path, f"{folder}/{key}" if is_file else folder)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                continue  # another process has taken this name since
            self.backend.write(f"{folder}/{REASON}", f"{reason}\n".encode())
            log.warning("%s %s: %s; moved to %s", kind, key, reason, self.backend.location(folder))
            return

    def changing(self, kind: str, key: str) -> AbstractContextManager[locks.Lock]:
        """Hold the lock to upload, replace or move an artifact's files, for seconds to minutes."""
        return locks.acquire(self.backend, f"locks/{kind}-{key}-files")

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
