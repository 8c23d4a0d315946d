"""Sources that are .bin/.idx pairs in Megatron's indexed format: verified once, then read in place.

Documents are held out by order, as Megatron splits a dataset: the last ones are for validation.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from modeling.data.indexed import HEADER, Index, IndexedError, data_path, index_path
from profiles.errors import ProfileError
from profiles.schema import Source
from tasks.sources import remote
from tasks.sources.changes import pair_digest, unchanged
from tasks.sources.digest_cache import DigestCache
from tasks.sources.files import describe_files
from tasks.sources.listing import list_files
from tasks.sources.shard import Shard, SourceError, local_path, open_file, resolve_filesystem

CHUNK = 1 << 24  # bytes per read


def shards(source: Source, key: str, digests: DigestCache) -> list[Shard]:
    """One shard per pair: the path is a pair's prefix, or matches `.idx` files.

    Raises:
        ProfileError: no pair, or an .idx file without its .bin file.
    """
    assert source.path is not None  # sources of Megatron pairs have one
    filesystem, path = resolve_filesystem(source.path, anonymous=source.anonymous)
    prefix = source.path.removesuffix(".idx").removesuffix(".bin")
    if remote.info(filesystem, f"{path.removesuffix('.idx').removesuffix('.bin')}.idx"):
        source = source.model_copy(update={"path": f"{prefix}.idx"})
    indices = [path for path in list_files(source, f"{key}.path") if path.endswith(".idx")]
    if not indices:
        raise ProfileError(f"{key}.path", source.path, "matches no .idx file")
    data = [path.removesuffix(".idx") + ".bin" for path in indices]
    for path in data:
        filesystem, remote_path = resolve_filesystem(path, anonymous=source.anonymous, refresh=False)
        if not remote.info(filesystem, remote_path):
            raise ProfileError(f"{key}.path", source.path, f"there is no {path}")
    found = []
    described = (describe_files(paths, source.anonymous, digests) for paths in (indices, data))
    for index, tokens in zip(*described, strict=True):
        name = index.path.removesuffix(".idx")
        paths, states = (index.path, tokens.path), (index.state, tokens.state)
        digest = pair_digest(index, tokens)
        found.append(Shard(name, "megatron", digest, paths, states=states, anonymous=source.anonymous))
    return found


def check(
    shard: Shard, vocabulary_size: int, validation_fraction: float, report: Callable[[int], None]
) -> dict[str, dict[str, int]]:
    """Verify a pair by reading all of it; returns each split's `start` (token), `tokens` and `documents`.

    Args:
        report: called with the number of tokens verified so far.

    Raises:
        IndexedError: a corrupted pair, sequences that are not contiguous, or a token outside the vocabulary.
        SourceChanged: the pair has changed since it was listed.
    """
    with unchanged(shard):
        return _check(shard, vocabulary_size, validation_fraction, report)


def _check(
    shard: Shard, vocabulary_size: int, validation_fraction: float, report: Callable[[int], None]
) -> dict[str, dict[str, int]]:
    prefix, size, index = _open_index(shard)
    total = 0
    for part in index.chunks(len(index.lengths)):
        ends = total + np.cumsum(index.lengths[part], dtype=np.int64)
        misplaced = index.pointers[part] != (ends - index.lengths[part]) * index.dtype.itemsize
        if misplaced.any():
            i = part.start + int(misplaced.argmax())
            offset = HEADER.size + 4 * len(index.lengths) + 8 * i
            raise IndexedError(index_path(prefix), offset, f"sequence {i} does not follow the one before it")
        total = int(ends[-1])
    if total * index.dtype.itemsize != size:
        offset = total * index.dtype.itemsize
        raise IndexedError(data_path(prefix), offset, f"has {size} bytes, but its index describes {offset}")
    offset = 0
    with open_file(shard, f"{prefix}.bin") as file:
        while data := file.read(CHUNK):
            tokens = np.frombuffer(data, index.dtype)
            invalid = (tokens >= vocabulary_size) | (tokens < 0)
            if invalid.any():
                i = int(invalid.argmax())
                reason = f"token {tokens[i]} is not in the vocabulary of {vocabulary_size}"
                raise IndexedError(data_path(prefix), offset + i * index.dtype.itemsize, reason)
            offset += len(data)
            report(offset // index.dtype.itemsize)
    held_out_by_use = {"split": int(index.documents * validation_fraction), "train": 0}
    held_out = held_out_by_use.get(shard.use, index.documents)
    train = index.documents - held_out
    sequence = int(index.document_indices[train])
    cut = int(index.pointers[sequence]) // index.dtype.itemsize if sequence < len(index.pointers) else total
    return {
        "train": {"start": 0, "tokens": cut, "documents": train},
        "validation": {"start": cut, "tokens": total - cut, "documents": held_out},
    }


def _open_index(shard: Shard) -> tuple[str, int, Index]:
    """Prefix, bytes of data and index of a pair; of a remote pair only the index is downloaded."""
    path = shard.paths[0]
    prefix = path.removesuffix(".idx")
    if local := local_path(path):
        prefix = str(local).removesuffix(".idx")
        size = data_path(prefix).stat().st_size
        return prefix, size, Index(prefix, size)
    filesystem, remote_path = resolve_filesystem(path, anonymous=shard.anonymous)
    data = f"{remote_path.removesuffix('.idx')}.bin"
    size = remote.call(filesystem, data, lambda: filesystem.info(data)["size"])
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "pair"
        remote.get_file(filesystem, remote_path, index_path(copy))
        try:
            return prefix, size, Index(copy, size)  # its memory map outlives the file's name
        except IndexedError as error:
            raise SourceError(str(error).replace(str(copy), prefix)) from None
