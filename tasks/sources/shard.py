"""A shard: a part of a source that is tokenized by itself, as a plain value that any machine can read from.

Its digest stands for its contents and for how they are read, never for paths or times: two shards of one digest hold the same
documents in the same order.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from modeling.data.indexed import IndexedError

HUB = "hf://datasets/"
BLOCK = 1 << 23  # bytes asked for at once of a file that is elsewhere


class SourceError(ValueError):
    """A source file that cannot be read as what its name says; the message names the file and the place in it."""


DAMAGED = (
    SourceError,
    IndexedError,
)  # what a source's files are refused with: they are the user's, as a profile is


def is_damage(error: Exception) -> bool:
    """Whether an error is the file's contents', and not one of the network, the disk or its rights."""
    if isinstance(error, ConnectionError | TimeoutError | FileNotFoundError | PermissionError):
        return False
    return not isinstance(error, OSError) or error.errno is None


@dataclass(frozen=True)
class Shard:
    """One cacheable piece of a source.

    Attributes:
        name: what users know it by.
        format: how it is read, a key of readers.READERS.
        digest: hash of everything that its documents depend on.
        paths: its files, of which most formats have one.
        start, stop: the part of its file: bytes of lines, row groups of parquet, record batches of arrow; None: to the end.
        column: field that holds the text or the token ids, where records have fields.
        source: number of its source in the profile.
        use: "split", "train" or "validation".
        anonymous: whether S3 is read without credentials.
        fetch: whether a hub's file is downloaded before it is read.
    """

    name: str
    format: str
    digest: str
    paths: tuple[str, ...] = ()
    start: int = 0
    stop: int | None = None
    column: str = ""
    source: int = 0
    use: str = "split"
    anonymous: bool = False
    fetch: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Shard:
        return cls(**{**value, "paths": tuple(value["paths"])})


def filesystem(path: str, *, anonymous: bool = False, token: str | None = None) -> tuple[Any, str]:
    """The fsspec file system of a path or URL, and the path in it; `token` is the hub's."""
    from fsspec.core import url_to_fs

    options: dict[str, Any] = {}
    if path.startswith("s3://"):
        options["anon"] = anonymous
    elif path.startswith(HUB) and token:
        options["token"] = token
    return url_to_fs(path, **options)


def local_path(path: str) -> Path | None:
    """A path or file:// URL as a path of this machine; None where it is elsewhere."""
    if "://" in path and not path.startswith("file://"):
        return None
    return Path(path.removeprefix("file://"))


def open_file(shard: Shard, path: str, token: str | None = None) -> BinaryIO:
    """One of a shard's files for reading in binary.

    What fsspec opens is read in blocks: its own readline asks for a whole block of the store for each line.
    """
    if shard.fetch and path.startswith(HUB):
        from huggingface_hub import hf_hub_download

        repository, _, rest = path.removeprefix(HUB).partition("@")
        revision, _, file = rest.partition("/")
        revision = revision.replace("%2F", "/")
        path = hf_hub_download(repository, file, repo_type="dataset", revision=revision, token=token)
    local = local_path(path)
    if local is not None:
        return local.open("rb")
    there, inner = filesystem(path, anonymous=shard.anonymous, token=token)
    return io.BufferedReader(there.open(inner, "rb", block_size=BLOCK), BLOCK)
