"""A shard: the part of a source that is tokenized as one unit, as a plain value that any machine can read.

Its digest covers its contents and how they are read, never paths or times: shards with equal digests contain the same
documents in the same order.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from modeling.data.indexed import IndexedError

HUB_PREFIX = "hf://datasets/"
BLOCK = 1 << 23  # bytes per request to a remote file


class SourceError(ValueError):
    """A source file whose contents do not match its format; the message names the file and the position."""


SOURCE_ERRORS = (SourceError, IndexedError)  # errors of the user's files: input errors, like a profile's


def is_corruption(error: Exception) -> bool:
    """Whether an error comes from a file's contents rather than from the network, the disk or permissions."""
    if isinstance(error, ConnectionError | TimeoutError | FileNotFoundError | PermissionError):
        return False
    return not isinstance(error, OSError) or error.errno is None


@dataclass(frozen=True)
class Shard:
    """One separately cached part of a source."""

    name: str  # shown to users
    format: str  # how it is read, a key of readers.READERS
    digest: str  # hash of everything that its documents depend on
    paths: tuple[str, ...] = ()  # its files; most formats have one
    start: int = 0  # part of the file, in bytes of lines, row groups of parquet or record batches of arrow
    stop: int | None = None  # end of that part; None: the end of the file
    column: str = ""  # field with the text or the token ids, if records have fields
    source: int = 0  # index of its source in the profile
    use: str = "split"  # or "train" or "validation"
    anonymous: bool = False  # whether S3 is read without credentials
    fetch: bool = False  # whether a file on the hub is downloaded before it is read

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Shard:
        return cls(**{**value, "paths": tuple(value["paths"])})


def resolve_filesystem(path: str, *, anonymous: bool = False, token: str | None = None) -> tuple[Any, str]:
    """The fsspec file system of a path or URL, and the path within it."""
    from fsspec.core import url_to_fs

    options: dict[str, Any] = {}
    if path.startswith("s3://"):
        options["anon"] = anonymous
    elif path.startswith(HUB_PREFIX) and token:
        options["token"] = token
    return url_to_fs(path, **options)


def local_path(path: str) -> Path | None:
    """A path or file:// URL as a path on this machine; None if it is remote."""
    if "://" in path and not path.startswith("file://"):
        return None
    return Path(path.removeprefix("file://"))


def open_file(shard: Shard, path: str, token: str | None = None) -> BinaryIO:
    """Open one of a shard's files for binary reading.

    Remote files are buffered in blocks: fsspec's own readline requests a whole block for each line.
    """
    if shard.fetch and path.startswith(HUB_PREFIX):
        from huggingface_hub import hf_hub_download

        repository, _, rest = path.removeprefix(HUB_PREFIX).partition("@")
        revision, _, file = rest.partition("/")
        revision = revision.replace("%2F", "/")
        path = hf_hub_download(repository, file, repo_type="dataset", revision=revision, token=token)
    if local := local_path(path):
        return local.open("rb")
    filesystem, remote_path = resolve_filesystem(path, anonymous=shard.anonymous, token=token)
    return io.BufferedReader(filesystem.open(remote_path, "rb", block_size=BLOCK), BLOCK)
