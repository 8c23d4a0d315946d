"""Where training text comes from: each source of a profile as shards, each shard as a stream of documents.

A shard is a plain value that says three things: its name (for people), the digest of its contents (for cache keys; never of
paths or times) and its documents, read as a stream. A new kind of source is one more function in KINDS.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from profiles.errors import ProfileError
from profiles.schema import Data, Source
from tasks import python_docs

Document = str | None  # None where a record has no text, or one that is not a string


class SourceError(ValueError):
    """A source file that cannot be read as what its name says; the message names the file and the place in it."""


class Shard(Protocol):
    """One cacheable piece of a source."""

    @property
    def name(self) -> str:
        """What users know it by."""

    def digest(self) -> str:
        """Hash of everything that its documents depend on."""

    def documents(self) -> Iterator[Document]:
        """Its documents, in an order that never changes."""


@dataclass(frozen=True)
class PythonDocs:
    """Python's own documentation, see python_docs.py."""

    name: str = "python-docs"

    def digest(self) -> str:
        return python_docs.digest()

    def documents(self) -> Iterator[Document]:
        return python_docs.documents()


@dataclass(frozen=True)
class File:
    """One file, anywhere that fsspec reaches.

    Attributes:
        name: its path or URL.
        column: name of the field that holds the text, where records have fields.
    """

    name: str
    column: str

    def digest(self) -> str:
        with self._open() as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        return f"{_format(self.name)}:{self.column}:{content}"

    def documents(self) -> Iterator[Document]:
        with self._open() as file:
            yield from READERS[_format(self.name)](file, self)

    def _open(self) -> BinaryIO:
        from fsspec.core import url_to_fs

        filesystem, path = url_to_fs(self.name)
        return filesystem.open(path, "rb")


def shards(data: Data) -> list[Shard]:
    """All shards of a profile's sources, in a fixed order.

    Raises:
        ProfileError: a source that lists no file, or a file of no known format.
    """
    return [shard for i, source in enumerate(data.sources) for shard in KINDS[source.kind](data, source, i)]


def held_out(text: str, fraction: float) -> bool:
    """Whether a document is one to validate on: by its own hash, so that other documents change nothing."""
    place = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    return place < fraction * 2**64


def _python_docs(data: Data, source: Source, i: int) -> list[Shard]:
    return [PythonDocs()]


def _files(data: Data, source: Source, i: int) -> list[Shard]:
    from fsspec.core import url_to_fs

    key = f"data.sources.{i}.path"
    filesystem, pattern = url_to_fs(source.path)
    if filesystem.isdir(pattern):
        pattern = f"{pattern.rstrip('/')}/*"
    paths = sorted(path for path in filesystem.glob(pattern) if filesystem.isfile(path))
    if not paths:
        raise ProfileError(key, source.path, "no file matches")
    for path in paths:
        if not _format(path):
            raise ProfileError(key, path, "is of no known format", tuple(READERS))
    return [File(filesystem.unstrip_protocol(path), data.text) for path in paths]


KINDS: dict[str, Callable[[Data, Source, int], list[Shard]]] = {"python-docs": _python_docs, "files": _files}


def _format(path: str) -> str | None:
    return next((suffix for suffix in READERS if path.lower().endswith(suffix)), None)


def _plain(file: BinaryIO, shard: File) -> Iterator[Document]:
    try:
        yield file.read().decode()
    except UnicodeDecodeError as error:
        raise SourceError(f"{shard.name}, byte {error.start}: is not UTF-8 text") from error


def _json_lines(file: BinaryIO, shard: File) -> Iterator[Document]:
    columns: dict[str, None] = {}  # an ordered set
    line = 0
    try:
        for line, content in enumerate(file, 1):
            if content.isspace():
                continue
            record = json.loads(content)
            if not isinstance(record, dict):
                raise SourceError(f"{shard.name}, line {line}: is no JSON object")
            if shard.column not in columns:
                columns.update(dict.fromkeys(record))
            yield _text(record.get(shard.column))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise SourceError(f"{shard.name}, line {line}: is not JSON: {error}") from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise SourceError(f"{shard.name}, after line {line}: damaged gzip: {error}") from error
    if columns:
        _require_column(shard, list(columns))


def _gzip_json_lines(file: BinaryIO, shard: File) -> Iterator[Document]:
    with gzip.open(file) as content:
        yield from _json_lines(content, shard)


def _parquet(file: BinaryIO, shard: File) -> Iterator[Document]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        table = ParquetFile(file)
        _require_column(shard, table.schema_arrow.names)
        for batch in table.iter_batches(batch_size=1024, columns=[shard.column]):
            yield from map(_text, batch.column(0).to_pylist())
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise SourceError(f"{shard.name}: damaged parquet: {error}") from error


READERS: dict[str, Callable[[BinaryIO, File], Iterator[Document]]] = {
    ".jsonl": _json_lines,
    ".jsonl.gz": _gzip_json_lines,
    ".parquet": _parquet,
    ".txt": _plain,
    ".md": _plain,
}


def _text(value: object) -> Document:
    return value if isinstance(value, str) else None


def _require_column(shard: File, columns: list[str]) -> None:
    if shard.column not in columns:
        raise ProfileError("data.text", shard.column, f"{shard.name} has no such column", tuple(columns))
