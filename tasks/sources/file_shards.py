"""Splits the files of a source into shards of about SHARD_BYTES.

A format that can be read from the middle is split: lines by bytes, parquet by row groups, local arrow files by record batches. A
compressed file is one shard, and so is a remote arrow file, where reading a part would fetch everything before it. Text files,
one document each, are grouped; group ends depend only on the files before them, so a new file changes only its own shard.
"""

from __future__ import annotations

import errno
import hashlib
import os
from codecs import BOM_UTF8
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

from profiles.files import retries
from profiles.schema import Source
from tasks.sources import json_layout
from tasks.sources.digest_cache import DigestCache
from tasks.sources.files import PARALLEL_READS, SourceFile, file_format
from tasks.sources.shard import Shard, local_path, open_file
from tasks.sources.tables import all_arrow_batches, arrow_encoding, parquet_layout

SHARD_BYTES = 100_000_000
READ = 1 << 22  # bytes
START = 1 << 16  # bytes of a file from which its layout is known
GROUP_FILES = 64  # average number of text files in a shard


def split_files(
    files: list[SourceFile], source: Source, column: str, digests: DigestCache, token: str | None = None
) -> list[Shard]:
    """Shards of files in order, text files of one document each first. Raises SourceError."""
    base = Shard("", "", "", column=column, anonymous=source.anonymous)

    def split(file: SourceFile) -> list[Shard]:
        kind = "lines" if file_format(file.path) == "text" else file_format(file.path)
        # Unknown only in saved datasets, whose files are read as Arrow whatever their names; their digests begin with "None".
        shard = replace(base, format=str(kind), paths=(file.path,), states=(file.state,))
        if kind in ("jsonl", "lines") and _has_lines(shard, file, token):
            return _split_by_lines(shard, file, digests)
        if kind == "parquet":
            encoding, sizes = _parquet_layout(shard, digests, token)
            return _with_encoding(_split_by_groups(shard, file, sizes), encoding)
        if kind == "arrow":
            sizes = [0]
            if file.size > 2 * SHARD_BYTES and local_path(file.path):
                sizes = [batch.nbytes for batch in all_arrow_batches(shard, token)]
            encoding = arrow_encoding(replace(shard, fetch=False), token)
            return _with_encoding(_split_by_groups(shard, file, sizes), encoding)
        return [_whole_file(shard, file)]

    if any(file_format(file.path) == "text" for file in files) and not source.lines:
        texts = [file for file in files if file_format(file.path) == "text"]
        retries.call_in_threads(lambda file: file.digest, texts, PARALLEL_READS)
        files = [file for file in files if file_format(file.path) != "text"]
        others = retries.call_in_threads(split, files, PARALLEL_READS)
        return [*_group_texts(texts, replace(base, format="text", column="")), *chain(*others)]
    return [*chain(*retries.call_in_threads(split, files, PARALLEL_READS))]


def _whole_file(shard: Shard, file: SourceFile) -> Shard:
    return replace(shard, name=file.path, digest=_digest(shard.format, shard.column, file.digest))


def _parts(shard: Shard, file: SourceFile, ranges: list[tuple[int, int, str]]) -> list[Shard]:
    """Shards of ranges (start, stop, digest of the contents) of a file."""
    parts = []
    for i, (start, stop, content) in enumerate(ranges, 1):
        name, digest = f"{file.path} part {i} of {len(ranges)}", _digest(shard.format, shard.column, content)
        parts.append(replace(shard, name=name, digest=digest, start=start, stop=stop))
    return parts


def _split_by_lines(shard: Shard, file: SourceFile, digests: DigestCache) -> list[Shard]:
    """Parts of a file of lines: the lines that start within SHARD_BYTES each."""
    starts = list(range(0, max(1, file.size), SHARD_BYTES))
    if len(starts) == 1:
        return [_whole_file(shard, file)]
    local = local_path(file.path)
    if local is not None:
        ranges = digests.get(local, f"lines {SHARD_BYTES}", lambda: list(_line_ranges(local)))
    else:
        stops = [*starts[1:], file.size]
        ranges = [(a, b, f"{file.digest}:{a}-{b}") for a, b in zip(starts, stops, strict=True)]
    return _parts(shard, file, ranges)


def _has_lines(shard: Shard, file: SourceFile, token: str | None) -> bool:
    """Whether a file can be cut at lines.

    A large JSON file may be an array, or its records may span lines.
    """
    if shard.format != "jsonl" or file.size <= SHARD_BYTES:
        return True
    with open_file(replace(shard, fetch=False), file.path, token, block=START) as content:
        return json_layout.is_lines(content.read(START).removeprefix(BOM_UTF8))


def _line_ranges(path: Path) -> Iterator[tuple[int, int, str]]:
    """Start, stop and sha256 of parts of complete lines; appending to the file changes only the last one."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = 0
        while start < size:
            file.seek(min(start + SHARD_BYTES, size) - 1)
            file.readline()
            stop = file.tell()
            yield start, stop, range_digest(path, start, stop)
            start = stop


def range_digest(path: Path, start: int, stop: int) -> str:
    """sha256 of a range of bytes of a file."""
    sha256 = hashlib.sha256()
    with path.open("rb") as file:
        file.seek(start)
        while data := file.read(min(READ, stop - file.tell())):
            sha256.update(data)
        if file.tell() < min(stop, os.fstat(file.fileno()).st_size):
            raise OSError(errno.EIO, f"ends at byte {file.tell()}, before {stop}", str(path))
    return sha256.hexdigest()


def _parquet_layout(shard: Shard, digests: DigestCache, token: str | None) -> tuple[str, list[int]]:
    """Encoding of the column, and its uncompressed bytes in each row group, cached for local files."""

    def read() -> tuple[str, list[int]]:
        return parquet_layout(replace(shard, fetch=False), token)

    local = local_path(shard.paths[0])
    return read() if local is None else digests.get(local, f"layout of {shard.column}", read)


def _with_encoding(shards: list[Shard], encoding: str) -> list[Shard]:
    """Shards whose digests begin with their column's encoding: earlier versions read no text from some."""
    return [replace(shard, digest=f"{encoding}{shard.digest}") for shard in shards]


def _split_by_groups(shard: Shard, file: SourceFile, sizes: list[int]) -> list[Shard]:
    """Parts of a file of row groups or record batches: at least one, as many as fit SHARD_BYTES."""
    ranges, start, total = [], 0, 0
    for i, size in enumerate(sizes):
        if total and total + size > SHARD_BYTES:
            ranges.append((start, i))
            start, total = i, 0
        total += size
    ranges.append((start, len(sizes)))
    if len(ranges) == 1:
        return [_whole_file(shard, file)]
    return _parts(shard, file, [(a, b, f"{file.digest}:{a}-{b}") for a, b in ranges])


def _group_texts(files: list[SourceFile], shard: Shard) -> list[Shard]:
    """Shards of one-document files; a shard ends at SHARD_BYTES, or after a file selected by its digest."""
    groups: list[list[SourceFile]] = [[]]
    size = 0
    for file in files:
        if groups[-1] and size + file.size > SHARD_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(file)
        size += file.size
        if int(hashlib.sha256(file.digest.encode()).hexdigest(), 16) % GROUP_FILES == 0:
            groups.append([])
            size = 0
    shards = []
    for group in filter(None, groups):
        content = hashlib.sha256("\n".join(file.digest for file in group).encode()).hexdigest()
        name = group[0].path + (f" and {len(group) - 1} more" if len(group) > 1 else "")
        paths, states = tuple(file.path for file in group), tuple(file.state for file in group)
        digest = _digest("text", "", content)
        shards.append(replace(shard, name=name, digest=digest, paths=paths, states=states))
    return shards


def _digest(kind: str, column: str, content: str) -> str:
    return f"{kind}:{column}:{content}"
