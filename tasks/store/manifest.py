"""An artifact's name, and its manifest: files with sizes and sha256, required artifacts, and summary.

It is written last: an artifact with a manifest is complete. Files are verified against it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from profiles.files.folders import walk
from profiles.files.state_files import retried
from tasks import keys
from tasks.store.backends.backend import NAME as VALID_NAME
from tasks.store.backends.backend import checked_name, checked_path

NAME = "manifest.json"


class Corrupted(Exception):
    """A file of an artifact is missing or differs from its manifest; the message names the file."""


@dataclass(frozen=True, order=True)
class ArtifactId:
    """Name of an artifact, the same in every store that has it."""

    kind: str  # which step made it
    key: str  # hash of everything that determines its contents

    @classmethod
    def parse(cls, text: str) -> ArtifactId:
        """The id that is written `<kind>/<key>`. Raises ValueError for another text."""
        kind, _, key = text.partition("/")
        if not (VALID_NAME.fullmatch(kind) and VALID_NAME.fullmatch(key)):
            raise ValueError(f"{text!r}: is not the name of an artifact; expected <kind>/<key>")
        return cls(kind, key)

    @property
    def path(self) -> str:
        """Path of the artifact's folder in a store. Raises ValueError for an invalid kind or key."""
        return f"artifacts/{checked_name(self.kind)}/{checked_name(self.key)}"

    @property
    def file_name(self) -> str:
        """Name of the artifact's locks and records, which are files of one folder."""
        return f"{self.kind}-{self.key}"

    def __str__(self) -> str:
        return f"{self.kind} {self.key}"


@dataclass(frozen=True)
class FileEntry:
    """One file: path relative to the artifact, size in bytes, sha256 in hexadecimal."""

    name: str
    size: int
    sha256: str

    def verify(self, folder: Path) -> None:
        """Hash the file in a folder and compare. Raises Corrupted if it differs."""
        self.compare(_sha256(folder / self.name))

    def compare(self, sha256: str) -> None:
        """Raises Corrupted if the sha256 differs."""
        if sha256 != self.sha256:
            raise Corrupted(f"{self.name} is corrupted: its sha256 differs from the manifest")


@dataclass(frozen=True)
class Manifest:
    """Contents of manifest.json."""

    id: ArtifactId
    created: str  # time in UTC, ISO 8601
    files: tuple[FileEntry, ...]
    requires: tuple[ArtifactId, ...]  # artifacts that this one points to
    summary: dict[str, Any]  # small facts for later steps, JSON
    seconds: float | None = None  # how long the artifact took to make; None if unknown

    @classmethod
    def of_folder(
        cls,
        folder: Path,
        id: ArtifactId,
        summary: Mapping[str, Any],
        requires: Iterable[ArtifactId],
        seconds: float | None = None,
    ) -> Manifest:
        """Manifest of a folder, with hashes. Raises ValueError for a link, a special file or a manifest.json."""
        found = dict(walk(folder))
        for name, entry in found.items():
            if not entry.is_file(follow_symlinks=False):
                raise ValueError(f"{id}: {name} is not a regular file")
        if NAME in found:
            raise ValueError(f"{id}: {NAME} is a reserved file name; rename the file")
        names = sorted(found)
        digests = _sha256_each([folder / name for name in names])
        sizes = (retried(found[name].stat).st_size for name in names)
        files = map(FileEntry, names, sizes, digests)
        created = datetime.now(UTC).isoformat()
        return cls(id, created, tuple(files), tuple(requires), dict(summary), seconds)

    @classmethod
    def of_listing(cls, sizes: Mapping[str, int], id: ArtifactId) -> Manifest:
        """Manifest of remote files, by name and size only."""
        files = tuple(FileEntry(name, size, "") for name, size in sorted(sizes.items()))
        return cls(id, datetime.now(UTC).isoformat(), files, (), {})

    def to_bytes(self) -> bytes:
        values = asdict(self)
        values = {**values.pop("id"), **values}
        return json.dumps({**values, "digest": keys.digest(values)}, indent=1).encode()

    @classmethod
    def from_bytes(cls, data: bytes, id: ArtifactId) -> Manifest:
        """Parse and verify manifest.json. Raises Corrupted if it was changed or is not of this artifact."""
        try:
            values = json.loads(data)
            digest = values.pop("digest")
            if digest != keys.digest(values) or ArtifactId(values.pop("kind"), values.pop("key")) != id:
                raise ValueError("digest, kind or key differs")
            values["files"] = tuple(FileEntry(**file) for file in values["files"])
            for file in values["files"]:
                checked_path(file.name)
            values["requires"] = tuple(ArtifactId(**other) for other in values["requires"])
            return cls(id, **values)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Corrupted(f"{NAME} is corrupted") from error

    def verify_sizes(self, sizes: Mapping[str, int]) -> None:
        """Compare with the names and sizes in bytes of existing files. Raises Corrupted if one differs."""
        for file in self.files:
            if file.name not in sizes:
                raise Corrupted(f"{file.name} is missing")
            if sizes[file.name] != file.size:
                raise Corrupted(f"{file.name} has {sizes[file.name]} bytes, expected {file.size}")

    def verify_contents(self, folder: Path, hash_limit: int) -> int:
        """Verify files by hash, smallest first, up to `hash_limit` bytes; returns the rest. Raises Corrupted."""
        hashed = []
        for file in sorted(self.files, key=lambda file: file.size):
            if file.size > hash_limit:
                break
            hash_limit -= file.size
            hashed.append(file)
        try:
            digests = _sha256_each([folder / file.name for file in hashed])
        except FileNotFoundError as error:
            raise Corrupted(f"{Path(error.filename).name} is missing") from error
        for file, digest in zip(hashed, digests, strict=True):
            file.compare(digest)
        return hash_limit


def _sha256_each(paths: Sequence[Path]) -> list[str]:
    """sha256 of each file, in threads: hashing releases the GIL."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(_sha256, paths))


def _sha256(path: Path) -> str:
    return retried(lambda: keys.file_digest(path))
