"""Detects source files changed after hashing: a shard's key covers the contents at listing time.

A file with the listed size, modification time and inode (a remote file: size and ETag, or modification time) counts as unchanged;
shard.py lists them.
One that differs, such as a copy restored from a backup, is hashed again before it is used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from profiles.schema import Source
from tasks.sources.digest_cache import DigestCache
from tasks.sources.file_shards import range_digest, split_files
from tasks.sources.files import SourceFile, describe_files
from tasks.sources.shard import Shard, SourceChanged, local_path, states


@contextmanager
def unchanged(shard: Shard, token: str | None = None) -> Iterator[None]:
    """Raise SourceChanged if a shard's files differ from those listed, at the block's beginning or end.

    Read the shard inside the block, and put the block inside the one that publishes the result.
    """
    if not shard.states:
        yield
        return

    def current() -> dict[str, str]:
        return dict(zip(shard.paths, states(shard, token), strict=True))

    listed, before = dict(zip(shard.paths, shard.states, strict=True)), current()
    if before != listed and not _has_digest(shard, token):
        raise SourceChanged(_different(listed, before), pinned=True)
    with unchanged_files(current, before):
        yield


@contextmanager
def unchanged_files(current: Callable[[], dict[str, str]], before: dict[str, str]) -> Iterator[None]:
    """Raise SourceChanged if the current states of files, by path, are others after the block than before."""
    try:
        yield
    except (ValueError, OSError) as error:  # perhaps because a file was replaced
        if (after := current()) != before:
            raise SourceChanged(_different(before, after)) from error
        raise
    if (after := current()) != before:
        raise SourceChanged(_different(before, after))


def pair_digest(index: SourceFile, tokens: SourceFile) -> str:
    """Digest of a shard that is a Megatron pair."""
    content = hashlib.sha256(f"{index.digest}\n{tokens.digest}".encode()).hexdigest()
    return f"megatron:{content}"


def _has_digest(shard: Shard, token: str | None) -> bool:
    """Whether a shard's files still have its digest; reads the files."""
    digest, path = shard.digest.removeprefix("tokens:"), local_path(shard.paths[0])
    if shard.format in ("jsonl", "lines") and shard.stop is not None and path is not None:
        return digest.endswith(f":{range_digest(path, shard.start, shard.stop)}")  # not the whole file
    files = describe_files(shard.paths, shard.anonymous, DigestCache(), token)
    if shard.format == "megatron":
        return digest == pair_digest(*files)
    source = Source(
        kind="files", path=shard.paths[0], lines=shard.format == "lines", anonymous=shard.anonymous
    )
    return digest in {each.digest for each in split_files(files, source, shard.column, DigestCache(), token)}


def _different(before: dict[str, str], after: dict[str, str]) -> str:
    return next(path for path in before | after if before.get(path) != after.get(path))
