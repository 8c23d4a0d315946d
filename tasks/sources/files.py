"""Describes the files of a source, local or on any fsspec file system, by size, state and digest.

A local file's digest is the sha256 of its contents; a remote one's is the object store's ETag or the hub's digest, so nothing is
read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from stat import S_ISREG

from profiles.errors import ProfileError
from profiles.files import retries
from profiles.schema import Profile
from tasks.sources import remote
from tasks.sources.digest_cache import DigestCache
from tasks.sources.listing import list_files
from tasks.sources.shard import SourceError, local_path, local_state, remote_state, resolve_filesystem, shown

FORMATS = {
    ".jsonl": "jsonl",
    ".json": "jsonl",
    **{f"{name}.{end}": f"jsonl.{end}" for name in (".jsonl", ".json") for end in ("gz", "zst", "xz", "bz2")},
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".csv": "csv",
    ".txt": "text",
    ".md": "text",
}
PARALLEL_READS = 16  # mostly waiting for the network or the disk


@dataclass(frozen=True)
class SourceFile:
    """A file of a source."""

    path: str  # path or URL
    size: int
    state: str  # shows later changes (`changes.unchanged`); taken before anything is read
    compute_digest: Callable[[], str]  # returns the digest of its contents, or the ETag that stands for it

    @cached_property
    def digest(self) -> str:
        return self.compute_digest()


def file_format(path: str) -> str | None:
    """The format implied by a file's extension; None if it is unknown."""
    name = path.lower()
    return next((kind for extension, kind in FORMATS.items() if name.endswith(extension)), None)


def text_bytes(profile: Profile) -> int | None:
    """Size of a profile's training files; None unless they are unweighted, uncompressed local text."""
    total = 0
    for number, source in enumerate(profile.data.sources):
        if source.kind != "files" or source.weight is not None:
            return None
        if source.path is None or "://" in source.path:
            return None
        if source.use != "validation":
            paths = list_files(source, f"data.sources.{number}.path")
            if any(file_format(path) not in ("jsonl", "text") for path in paths):
                return None
            total += sum(Path(path).stat().st_size for path in paths)
    return round(total * (1 - profile.data.validation_fraction))


def require_known_formats(paths: Iterable[str], key: str, value: str | None) -> None:
    """Raises ProfileError for `key` if a file has an unknown extension."""
    for path in paths:
        if not file_format(path):
            raise ProfileError(key, value, f"{path.rpartition('/')[2]} has an unknown format", tuple(FORMATS))


def describe_files(
    paths: Sequence[str], anonymous: bool, digests: DigestCache, token: str | None = None
) -> list[SourceFile]:
    """Sizes and, when first used, digests of files."""

    def describe(path: str) -> SourceFile:
        if local := local_path(path):
            state, stat = local_state(local), local.stat()
            if not S_ISREG(stat.st_mode):  # a pipe would block
                raise SourceError(f"{shown(path)}: not a regular file; move it out of the data")
            return SourceFile(path, stat.st_size, state, lambda: digests.sha256(local))
        filesystem, remote_path = resolve_filesystem(path, anonymous=anonymous, token=token, refresh=False)
        info = remote.call(filesystem, remote_path, lambda: filesystem.info(remote_path))
        lfs = info.get("lfs")
        tag = (lfs and lfs["sha256"]) or info.get("blob_id") or info.get("ETag")

        def read() -> str:
            with remote.open_file(filesystem, remote_path) as file:
                return hashlib.file_digest(file, "sha256").hexdigest()

        digest = read if tag is None else lambda: str(tag).strip('"')
        return SourceFile(path, info["size"], remote_state(path, info), digest)

    return retries.call_in_threads(describe, paths, PARALLEL_READS)
