"""Where training text comes from: the sources of a profile as shards, in a fixed order, and which documents are held out.

A new kind of source is one more entry in KINDS.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace

from profiles.schema import Data, Source
from tasks.sources import files, hub, megatron, python_docs
from tasks.sources.shard import Shard
from tasks.store.digest_cache import DigestCache


def shards(data: Data, digests: DigestCache | None = None, token: str | None = None) -> list[Shard]:
    """All shards of a profile's sources, in a fixed order.

    Args:
        digests: what is known of local files; without it all are read.
        token: for the hub.

    Raises:
        ProfileError: a source that lists nothing, or a file of no known format.
        SourceError: a damaged file.
    """
    digests = digests or DigestCache()
    found = []
    for i, source in enumerate(data.sources):
        column = source.text or data.text
        own = KINDS[source.kind](source, f"data.sources.{i}", column, digests, token)
        found += [replace(shard, source=i, use=source.use) for shard in own]
    return found


def held_out(text: str, fraction: float) -> bool:
    """Whether a document is one to validate on: by its own hash, so that other documents change nothing."""
    return held_out_by(hashlib.sha256(text.encode()).digest(), fraction)


def held_out_by(digest: bytes, fraction: float) -> bool:
    """The same, of a document of this sha256."""
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


Lister = Callable[[Source, str, str, DigestCache, str | None], list[Shard]]
KINDS: dict[str, Lister] = {
    "python-docs": lambda *_: [Shard("python-docs", "python-docs", python_docs.digest())],
    "files": lambda source, key, column, digests, _: files.shards(source, key, column, digests),
    "tokens": lambda source, key, column, digests, _: files.tokens(source, key, column, digests),
    "megatron": lambda source, key, _, digests, __: megatron.shards(source, key, digests),
    "hub": hub.shards,
}
