"""Lists the files of a source, local or on any fsspec file system, and describes them by size and digest.

A local file's digest is the sha256 of its contents; a remote one's is the object store's ETag or the hub's digest, so nothing is
read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from profiles.errors import ProfileError
from profiles.schema import Source
from tasks.sources.shard import SourceError, local_path, resolve_filesystem
from tasks.store.digest_cache import DigestCache

FORMATS = {
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".jsonl.gz": "jsonl.gz",
    ".json.gz": "jsonl.gz",
    ".jsonl.zst": "jsonl.zst",
    ".json.zst": "jsonl.zst",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
    ".md": "text",
}
METADATA_FILES = ("dataset_info.json", "state.json", "dataset_dict.json")  # of save_to_disk
DATASET_CARD = "readme.md"
HIDDEN_PREFIXES = (".", "_")  # of files that Spark, git and others put beside data
PARALLEL_READS = 16  # mostly waiting for the network or the disk
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class SourceFile:
    """A file of a source."""

    path: str  # path or URL
    size: int
    compute_digest: Callable[[], str]  # gives the digest of its contents, or the ETag that stands for it

    @cached_property
    def digest(self) -> str:
        return self.compute_digest()

    @property
    def name(self) -> str:
        return self.path.removeprefix("file://")


def list_files(source: Source, key: str) -> list[str]:
    """URLs of the files that a source's path means, sorted: one file, a glob pattern's matches, or a folder, recursively.

    A folder's README.md and hidden files are left out. Raises ProfileError for the profile key `key` if no file matches.
    """
    path = source.path if "://" in source.path else str(Path(source.path).expanduser())
    filesystem, pattern = resolve_filesystem(path, anonymous=source.anonymous)
    if filesystem.isfile(pattern):  # before globbing: a file's name may contain brackets
        return [filesystem.unstrip_protocol(pattern)]
    if filesystem.isdir(pattern):
        prefix = len(pattern.rstrip("/")) + 1
        found = [path for path in filesystem.find(pattern) if not _is_metadata(path[prefix:])]
    else:
        matches = filesystem.glob(pattern, detail=True)
        found = [path for path, info in matches.items() if info["type"] == "file"]
    found = sorted(path for path in found if path.rpartition("/")[2] not in METADATA_FILES)
    if not found:
        raise ProfileError(key, source.path, "no file matches")
    return [filesystem.unstrip_protocol(path) for path in found]


def list_saved_dataset(source: Source, key: str) -> list[str]:
    """URLs of the data files of a folder that `datasets` wrote with save_to_disk, in its own order.

    Raises ProfileError for the profile key `key` if there is none, SourceError for a corrupted state.json.
    """
    filesystem, folder = resolve_filesystem(source.path, anonymous=source.anonymous)
    folder = folder.rstrip("/")
    if not filesystem.isfile(f"{folder}/state.json"):
        if not filesystem.isfile(f"{folder}/dataset_dict.json"):
            raise ProfileError(key, source.path, "has no state.json of save_to_disk")
        splits = [path for path in filesystem.ls(folder, detail=False) if filesystem.isdir(path)]
        raise ProfileError(key, source.path, "has several splits; name the folder of one", splits)
    try:
        state = json.loads(filesystem.cat_file(f"{folder}/state.json"))
        names = [entry["filename"] for entry in state["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise SourceError(f"{source.path}/state.json: not written by save_to_disk: {error}") from error
    if not names:
        raise ProfileError(key, source.path, "contains no data files")
    return [filesystem.unstrip_protocol(f"{folder}/{name}") for name in names]


def file_format(path: str) -> str | None:
    """The format implied by a file's extension; None if it is unknown."""
    name = path.lower()
    return next((kind for extension, kind in FORMATS.items() if name.endswith(extension)), None)


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
            return SourceFile(path, local.stat().st_size, lambda: digests.sha256(local))
        filesystem, remote_path = resolve_filesystem(path, anonymous=anonymous, token=token)
        info = filesystem.info(remote_path)
        lfs = info.get("lfs")
        tag = (lfs and lfs["sha256"]) or info.get("blob_id") or info.get("ETag")

        def read() -> str:
            with filesystem.open(remote_path, "rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()

        return SourceFile(path, info["size"], read if tag is None else lambda: str(tag).strip('"'))

    return map_concurrently(describe, paths)


def map_concurrently(function: Callable[[T], R], values: Sequence[T]) -> list[R]:
    with ThreadPoolExecutor(PARALLEL_READS) as pool:
        return list(pool.map(function, values))


def _is_metadata(path: str) -> bool:
    """Whether a path within a folder is a dataset card or hidden."""
    *folders, name = path.split("/")
    return name.lower() == DATASET_CARD or any(part.startswith(HIDDEN_PREFIXES) for part in (*folders, name))
