"""Sources that are files, here or anywhere that fsspec reaches: which files there are, and the shards that they are cut into.

A file that can be read from its middle is cut into parts of about SHARD_BYTES: lines by bytes, parquet by row groups, arrow by
record batches. A compressed file is one shard, whatever its size, and so is an arrow file that is elsewhere, since all that is
before a part of it would be fetched for the part. Documents that are files of their own are gathered
into shards whose ends depend on the files there alone, so that a new file changes the shard it falls into and no other.

A local file's digest is that of its contents; elsewhere the store's own ETag (or the hub's) stands for them, and nothing is read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from profiles.errors import ProfileError
from profiles.schema import Source
from tasks.sources import columnar
from tasks.sources.shard import Shard, SourceError, filesystem, local_path
from tasks.store.digest_cache import DigestCache

SHARD_BYTES = 100_000_000
READ = 1 << 22  # bytes
GATHERED = 64  # files a shard on average, where a document is a file
ENDINGS = {
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
FOLDER_FILES = ("dataset_info.json", "state.json", "dataset_dict.json")  # beside arrow files, not data
CARD = "readme.md"  # what says of a folder what is in it, on the hub and elsewhere
HIDDEN = (".", "_")  # with which names begin that Spark, git and others put beside data
READERS_AT_ONCE = 16  # of files' footers and contents: most of the time is waiting


@dataclass(frozen=True)
class File:
    """A file of a source.

    Attributes:
        path: path or URL.
        size: bytes.
        read: gives the digest of its contents, or what stands for it.
    """

    path: str
    size: int
    read: Callable[[], str]

    @cached_property
    def content(self) -> str:
        return self.read()


def shards(source: Source, key: str, column: str, digests: DigestCache) -> list[Shard]:
    """All shards of a source of files, in a fixed order.

    Raises:
        ProfileError: no file, or one of no known format.
        SourceError: a damaged file.
    """
    paths = listed(source, f"{key}.path")
    for path in paths:
        if not ending(path):
            reason = f"{path.rpartition('/')[2]} is of no known format"
            raise ProfileError(f"{key}.path", source.path, reason, tuple(ENDINGS))
    return cut(described(paths, source.anonymous, digests), source, column, digests)


def tokens(source: Source, key: str, column: str, digests: DigestCache) -> list[Shard]:
    """The shards of a folder that `datasets` wrote with save_to_disk, in its own order.

    Raises:
        ProfileError: no such folder.
        SourceError: a damaged state.json or data file.
    """
    there, folder = filesystem(source.path, anonymous=source.anonymous)
    state = f"{folder.rstrip('/')}/state.json"
    if not there.isfile(state):
        several = there.isfile(f"{folder.rstrip('/')}/dataset_dict.json")
        reason = (
            "has several splits; name the folder of one" if several else "has no state.json of save_to_disk"
        )
        splits = [path for path in there.ls(folder, detail=False) if there.isdir(path)] if several else []
        raise ProfileError(f"{key}.path", source.path, reason, splits)
    try:
        names = [entry["filename"] for entry in json.loads(there.cat_file(state))["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise SourceError(f"{source.path}/state.json: is not as save_to_disk writes it: {error}") from error
    if not names:
        raise ProfileError(f"{key}.path", source.path, "holds no data files")
    paths = [there.unstrip_protocol(f"{folder.rstrip('/')}/{name}") for name in names]
    found = cut(described(paths, source.anonymous, digests), source, column, digests)
    return [replace(shard, format="tokens", digest=f"tokens:{shard.digest}") for shard in found]


def listed(source: Source, key: str) -> list[str]:
    """URLs of all files that a source's path means, sorted: a file, those that match a pattern, or all of a folder and of those
    within it, but for its README.md and what is hidden.

    Raises:
        ProfileError: no file.
    """
    path = source.path if "://" in source.path else str(Path(source.path).expanduser())
    there, pattern = filesystem(path, anonymous=source.anonymous)
    if there.isfile(pattern):  # whatever its name, brackets in it too
        return [there.unstrip_protocol(pattern)]
    if there.isdir(pattern):
        within = len(pattern.rstrip("/")) + 1
        found = [path for path in there.find(pattern) if not _beside_data(path[within:])]
    else:
        found = [path for path, info in there.glob(pattern, detail=True).items() if info["type"] == "file"]
    found = sorted(path for path in found if path.rpartition("/")[2] not in FOLDER_FILES)
    if not found:
        raise ProfileError(key, source.path, "no file matches")
    return [there.unstrip_protocol(path) for path in found]


def _beside_data(path: str) -> bool:
    """Whether a path within a folder is of what is there beside the data."""
    *folders, name = path.split("/")
    return name.lower() == CARD or any(part.startswith(HIDDEN) for part in (*folders, name))


def ending(path: str) -> str | None:
    """The format that a file's name promises."""
    name = path.lower()
    return next((kind for end, kind in ENDINGS.items() if name.endswith(end)), None)


def described(
    paths: list[str], anonymous: bool, digests: DigestCache, token: str | None = None
) -> list[File]:
    """What is known of each file."""

    def describe(path: str) -> File:
        local = local_path(path)
        if local is not None:
            return File(path, local.stat().st_size, lambda: digests.sha256(local))
        there, inner = filesystem(path, anonymous=anonymous, token=token)
        info = there.info(inner)
        lfs = info.get("lfs")
        mark = (lfs and lfs["sha256"]) or info.get("blob_id") or info.get("ETag")

        def read() -> str:
            with there.open(inner, "rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()

        return File(path, info["size"], read if mark is None else lambda: str(mark).strip('"'))

    return _each(describe, paths)


def cut(
    files: list[File], source: Source, column: str, digests: DigestCache, token: str | None = None
) -> list[Shard]:
    """The files as shards of about SHARD_BYTES."""
    base = Shard("", "", "", column=column, anonymous=source.anonymous)

    def parts(file: File) -> list[Shard]:
        kind = "lines" if ending(file.path) == "text" else ending(file.path)
        shard = replace(base, format=kind, paths=(file.path,))
        if kind in ("jsonl", "lines"):
            return _by_lines(shard, file, digests)
        if kind == "parquet":
            return _by_groups(shard, file, _row_groups(shard, digests, token))
        if kind == "arrow" and file.size > 2 * SHARD_BYTES and local_path(file.path):
            return _by_groups(shard, file, [batch.nbytes for batch in columnar.arrow_batches(shard, token)])
        return [replace(shard, name=_name(file), digest=_digest(kind, column, file.content))]

    if any(ending(file.path) == "text" for file in files) and not source.lines:
        whole = [file for file in files if ending(file.path) == "text"]
        _each(lambda file: file.content, whole)
        rest = _each(parts, [file for file in files if ending(file.path) != "text"])
        return [*_gathered(whole, replace(base, format="text", column="")), *chain(*rest)]
    return [*chain(*_each(parts, files))]


def _by_lines(shard: Shard, file: File, digests: DigestCache) -> list[Shard]:
    """Parts of a file of lines: those that start in so many bytes each."""
    starts = list(range(0, max(1, file.size), SHARD_BYTES))
    if len(starts) == 1:
        digest = _digest(shard.format, shard.column, file.content)
        return [replace(shard, name=_name(file), digest=digest)]
    stops = [*starts[1:], file.size]
    local = local_path(file.path)
    if local is not None:
        ranges = digests.get(local, f"lines {SHARD_BYTES}", lambda: list(_line_ranges(local)))
    else:
        ranges = [(a, b, f"{file.content}:{a}-{b}") for a, b in zip(starts, stops, strict=True)]
    return [
        replace(
            shard,
            name=f"{_name(file)} part {i} of {len(ranges)}",
            digest=_digest(shard.format, shard.column, content),
            start=start,
            stop=stop,
        )
        for i, (start, stop, content) in enumerate(ranges, 1)
    ]


def _line_ranges(path: Path) -> Iterator[tuple[int, int, str]]:
    """Start, stop and sha256 of parts of whole lines. A file that grows at its end changes the last of them alone."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = 0
        while start < size:
            file.seek(min(start + SHARD_BYTES, size) - 1)
            file.readline()
            stop = file.tell()
            file.seek(start)
            content = hashlib.sha256()
            while file.tell() < stop:
                content.update(file.read(min(READ, stop - file.tell())))
            yield start, stop, content.hexdigest()
            start = stop


def _row_groups(shard: Shard, digests: DigestCache, token: str | None) -> list[int]:
    """Bytes of each row group's column, uncompressed."""

    def read() -> list[int]:
        return columnar.row_groups(replace(shard, fetch=False), token)

    local = local_path(shard.paths[0])
    return read() if local is None else digests.get(local, f"groups of {shard.column}", read)


def _by_groups(shard: Shard, file: File, sizes: list[int]) -> list[Shard]:
    """Parts of a file of row groups or record batches: as many as make SHARD_BYTES, one at least."""
    ranges, start, size = [], 0, 0
    for i, more in enumerate(sizes):
        if size and size + more > SHARD_BYTES:
            ranges.append((start, i))
            start, size = i, 0
        size += more
    ranges.append((start, len(sizes)))
    if len(ranges) == 1:
        digest = _digest(shard.format, shard.column, file.content)
        return [replace(shard, name=_name(file), digest=digest)]
    return [
        replace(
            shard,
            name=f"{_name(file)} part {i} of {len(ranges)}",
            digest=_digest(shard.format, shard.column, f"{file.content}:{start}-{stop}"),
            start=start,
            stop=stop,
        )
        for i, (start, stop) in enumerate(ranges, 1)
    ]


def _gathered(files: list[File], shard: Shard) -> list[Shard]:
    """Files of a document each: a shard ends after a file whose digest says so, or where it is full."""
    groups: list[list[File]] = [[]]
    size = 0
    for file in files:
        if groups[-1] and size + file.size > SHARD_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(file)
        size += file.size
        if int(hashlib.sha256(file.content.encode()).hexdigest(), 16) % GATHERED == 0:
            groups.append([])
            size = 0
    shards = []
    for group in filter(None, groups):
        contents = hashlib.sha256("\n".join(file.content for file in group).encode()).hexdigest()
        name = _name(group[0]) + (f" and {len(group) - 1} more" if len(group) > 1 else "")
        paths = tuple(file.path for file in group)
        shards.append(replace(shard, name=name, digest=_digest("text", "", contents), paths=paths))
    return shards


def _digest(kind: str, column: str, content: str) -> str:
    return f"{kind}:{column}:{content}"


def _name(file: File) -> str:
    return file.path.removeprefix("file://")


def _each(do: Callable[[Any], Any], items: list[Any]) -> list[Any]:
    with ThreadPoolExecutor(READERS_AT_ONCE) as pool:
        return list(pool.map(do, items))
