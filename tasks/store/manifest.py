"""An artifact's manifest: its files with their sizes and hashes, the artifacts it points to, and its summary.

It is written last, so an artifact that has one was finished; and it is what the files are verified against.
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

from tasks import keys

NAME = "manifest.json"


class Damaged(Exception):
    """An artifact that is not as it was published; the message says which file and how."""


@dataclass(frozen=True)
class File:
    """One file: its path in the artifact, its size in bytes, and the sha256 of its contents in hexadecimal."""

    name: str
    size: int
    sha256: str

    def verify(self, folder: Path) -> None:
        """Hash the file in a folder again. Raises `Damaged` where it has changed."""
        self.compare(keys.file_digest(folder / self.name))

    def compare(self, digest: str) -> None:
        """Raise `Damaged` where the file's contents now have another sha256."""
        if digest != self.sha256:
            raise Damaged(f"{self.name} is damaged: its contents have changed")


@dataclass(frozen=True)
class Manifest:
    """What is said of an artifact; `requires` are other artifacts' kinds and keys, `created` is in UTC, `seconds` it took."""

    kind: str
    key: str
    created: str
    files: tuple[File, ...]
    requires: tuple[tuple[str, str], ...]
    summary: dict[str, Any]
    seconds: float | None = None

    @classmethod
    def of(
        cls,
        folder: Path,
        kind: str,
        key: str,
        summary: Mapping[str, Any],
        requires: Iterable[Mapping[str, str]],
        seconds: float | None = None,
    ) -> Manifest:
        """The manifest of the files in a folder, which it hashes.

        Raises:
            ValueError: a link or another thing that is no plain file; a manifest of somebody else's.
        """
        paths = sorted(path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
        for path in paths:
            if path.is_symlink() or not path.is_file():
                raise ValueError(
                    f"{kind} {key}: {path.relative_to(folder)} is no plain file; an artifact has no others"
                )
        if folder / NAME in paths:
            raise ValueError(f"{kind} {key}: a file is called {NAME}, which is the artifact's own")
        names = [path.relative_to(folder).as_posix() for path in paths]
        described = map(File, names, (path.stat().st_size for path in paths), _digests(paths))
        needed = tuple((other["kind"], other["key"]) for other in requires)
        created = datetime.now(UTC).isoformat()
        return cls(kind, key, created, tuple(described), needed, dict(summary), seconds)

    @classmethod
    def listed(cls, found: Mapping[str, int], kind: str, key: str) -> Manifest:
        """The manifest of files that lie elsewhere, by their sizes alone."""
        files = tuple(File(name, size, "") for name, size in sorted(found.items()))
        return cls(kind, key, datetime.now(UTC).isoformat(), files, (), {})

    def to_bytes(self) -> bytes:
        values = {
            **asdict(self),
            "requires": [{"kind": kind, "key": key} for kind, key in self.requires],
        }
        return json.dumps({**values, "digest": keys.digest(values)}, indent=1).encode()

    @classmethod
    def from_bytes(cls, data: bytes, kind: str, key: str) -> Manifest:
        """Read it back.

        Raises:
            Damaged: it is not the manifest of this artifact, as it was written.
        """
        try:
            values = json.loads(data)
            own = values.pop("digest")
            if own != keys.digest(values) or (values["kind"], values["key"]) != (kind, key):
                raise ValueError("it was changed")
            values["files"] = tuple(File(**file) for file in values["files"])
            values["requires"] = tuple((other["kind"], other["key"]) for other in values["requires"])
            return cls(**values)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Damaged(f"{NAME} is damaged") from error

    def verify_sizes(self, found: Mapping[str, int]) -> None:
        """Against the names and sizes in bytes of the files that are there. Raises Damaged."""
        for file in self.files:
            if file.name not in found:
                raise Damaged(f"{file.name} is gone")
            if found[file.name] != file.size:
                raise Damaged(f"{file.name} has {found[file.name]} bytes of {file.size}")

    def verify_contents(self, folder: Path, limit: int) -> int:
        """Hash files again, the smallest first, up to so many bytes in all; returns what is left of the limit.

        Raises:
            Damaged: a file whose contents have changed.
        """
        checked = []
        for file in sorted(self.files, key=lambda file: file.size):
            if file.size > limit:
                break
            limit -= file.size
            checked.append(file)
        try:
            digests = _digests([folder / file.name for file in checked])
        except FileNotFoundError as error:
            raise Damaged(f"{Path(error.filename).name} is gone") from error
        for file, digest in zip(checked, digests, strict=True):
            file.compare(digest)
        return limit


def _digests(paths: Sequence[Path]) -> list[str]:
    """sha256 of each, several at a time: hashing leaves the interpreter's lock to others."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(keys.file_digest, paths))
