"""The data sources of a profile as shards, in a fixed order, and the choice of held-out documents.

To add a kind of source, add an entry to KINDS.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace

from profiles.schema import Source
from tasks.sources import files, hub, listing, megatron, python_docs
from tasks.sources.digest_cache import DigestCache
from tasks.sources.file_shards import split_files
from tasks.sources.shard import Shard


def shards_of_source(
    source: Source, key: str, text: str, digests: DigestCache, token: str | None = None
) -> list[Shard]:
    """All shards of one source of a profile, in a fixed order.

    Args:
        key: the source's key in the profile, for errors.
        text: name of the field with a record's text, unless the source has one.
        digests: cached digests of local files.

    Raises:
        ProfileError: a source without files, or a file of unknown format.
        SourceError: a corrupted file.
    """
    return KINDS[source.kind](source, key, source.text or text, digests, token)


def is_held_out(text: str, fraction: float) -> bool:
    """Whether a document is for validation, decided by its own hash, independently of other documents."""
    return is_digest_held_out(hashlib.sha256(text.encode()).digest(), fraction)


def is_digest_held_out(digest: bytes, fraction: float) -> bool:
    """`is_held_out` for a document's sha256."""
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def _files(source: Source, key: str, column: str, digests: DigestCache, token: str | None) -> list[Shard]:
    paths = listing.list_files(source, f"{key}.path")
    files.require_known_formats(paths, f"{key}.path", source.path)
    described = files.describe_files(paths, source.anonymous, digests)
    return split_files(described, source, column, digests)


def _tokens(source: Source, key: str, column: str, digests: DigestCache, token: str | None) -> list[Shard]:
    paths = listing.list_saved_dataset(source, f"{key}.path")
    described = files.describe_files(paths, source.anonymous, digests)
    return [
        replace(shard, format="tokens", digest=f"tokens:{shard.digest}")
        for shard in split_files(described, source, column, digests)
    ]


Lister = Callable[[Source, str, str, DigestCache, str | None], list[Shard]]
KINDS: dict[str, Lister] = {
    "python-docs": lambda *_: [Shard("python-docs", "python-docs", python_docs.DIGEST)],
    "files": _files,
    "tokens": _tokens,
    "megatron": lambda source, key, _, digests, __: megatron.shards(source, key, digests),
    "hub": hub.shards,
}
