"""Sources that are ready-made pairs in Megatron's indexed format: checked once, then read where they lie.

A pair is held out from by its documents' order, as Megatron splits one: the last of them are for validation.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from modeling.data.indexed import HEADER, Index, IndexedError, data_path, index_path
from profiles.errors import ProfileError
from profiles.schema import Source
from tasks.sources.files import described, listed
from tasks.sources.shard import Shard, SourceError, filesystem, local_path, open_file
from tasks.store.digest_cache import DigestCache

CHUNK = 1 << 24  # bytes looked at together


def shards(source: Source, key: str, digests: DigestCache) -> list[Shard]:
    """A shard a pair, of the path's prefix or of each `.idx` that it matches.

    Raises:
        ProfileError: no pair, or half of one.
    """
    there, inner = filesystem(source.path, anonymous=source.anonymous)
    prefix = source.path.removesuffix(".idx").removesuffix(".bin")
    if there.isfile(f"{inner.removesuffix('.idx').removesuffix('.bin')}.idx"):
        source = source.model_copy(update={"path": f"{prefix}.idx"})
    indices = [path for path in listed(source, f"{key}.path") if path.endswith(".idx")]
    if not indices:
        raise ProfileError(f"{key}.path", source.path, "no .idx file is there")
    data = [path.removesuffix(".idx") + ".bin" for path in indices]
    for path in data:
        there, inner = filesystem(path, anonymous=source.anonymous)
        if not there.isfile(inner):
            raise ProfileError(f"{key}.path", source.path, f"there is no {path}")
    pairs = zip(
        described(indices, source.anonymous, digests), described(data, source.anonymous, digests), strict=True
    )
    found = []
    for index, tokens in pairs:
        content = hashlib.sha256(f"{index.content}\n{tokens.content}".encode()).hexdigest()
        name = index.path.removeprefix("file://").removesuffix(".idx")
        found.append(
            Shard(name, "megatron", f"megatron:{content}", (index.path,), anonymous=source.anonymous)
        )
    return found


def check(
    shard: Shard,
    vocabulary_size: int,
    validation_fraction: float,
    report: Callable[[int], None],
) -> dict[str, dict[str, int]]:
    """Where each split of a pair lies: its first token, its tokens and its documents. Reads all of it once.

    Args:
        report: called with the tokens looked at so far.

    Raises:
        IndexedError: a damaged pair, one whose sequences do not follow each other, or a token beyond the vocabulary.
    """
    prefix, size, index = _index(shard)
    total = 0
    for part in index.chunks(len(index.lengths)):
        ends = total + np.cumsum(index.lengths[part], dtype=np.int64)
        misplaced = index.pointers[part] != (ends - index.lengths[part]) * index.dtype.itemsize
        if misplaced.any():
            i = part.start + int(misplaced.argmax())
            at = HEADER.size + 4 * len(index.lengths) + 8 * i
            raise IndexedError(index_path(prefix), at, f"sequence {i} does not follow the one before it")
        total = int(ends[-1])
    if total * index.dtype.itemsize != size:
        at = total * index.dtype.itemsize
        raise IndexedError(data_path(prefix), at, f"holds {size} bytes, of which its index knows {at}")
    at = 0
    with open_file(shard, f"{prefix}.bin") as file:
        while data := file.read(CHUNK):
            part = np.frombuffer(data, index.dtype)
            wrong = (part >= vocabulary_size) | (part < 0)
            if wrong.any():
                i = int(wrong.argmax())
                reason = f"token {part[i]} is not in the vocabulary of {vocabulary_size}"
                raise IndexedError(data_path(prefix), at + i * index.dtype.itemsize, reason)
            at += len(data)
            report(at // index.dtype.itemsize)
    held_out = {"split": int(index.documents * validation_fraction), "train": 0}.get(
        shard.use, index.documents
    )
    kept = index.documents - held_out
    sequence = int(index.document_indices[kept])
    cut = int(index.pointers[sequence]) // index.dtype.itemsize if sequence < len(index.pointers) else total
    return {
        "train": {"start": 0, "tokens": cut, "documents": kept},
        "validation": {"start": cut, "tokens": total - cut, "documents": held_out},
    }


def _index(shard: Shard) -> tuple[str, int, Index]:
    """Prefix, bytes of data and index of a pair; of one that is elsewhere only the index is fetched."""
    path = shard.paths[0]
    prefix = path.removesuffix(".idx")
    local = local_path(path)
    if local is not None:
        prefix = str(local).removesuffix(".idx")
        size = data_path(prefix).stat().st_size
        return prefix, size, Index(prefix, size)
    there, inner = filesystem(path, anonymous=shard.anonymous)
    size = there.info(f"{inner.removesuffix('.idx')}.bin")["size"]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "pair"
        there.get_file(inner, str(index_path(copy)))
        try:
            return prefix, size, Index(copy, size)  # its map outlives the file's name
        except IndexedError as error:
            raise SourceError(str(error).replace(str(copy), prefix)) from None
