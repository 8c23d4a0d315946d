"""Reads the documents of a shard by its format, as a stream in a fixed order.

A document is text (a str, or a LongText if it is long), token ids if the source is already tokenized, or None if a record has no
text or its text cannot be encoded (a lone surrogate): such records are counted, and do not stop a corpus. Contents that do not
match the file's format raise a SourceError with file and position.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO
from uuid import uuid4

from tasks.sources import python_docs
from tasks.sources.changes import unchanged
from tasks.sources.formats import columnar, long_text
from tasks.sources.formats.columnar import TokenIds
from tasks.sources.formats.long_text import LongText
from tasks.sources.shard import Shard, SourceError, is_corruption, open_file
from tasks.sources.tables import require_column

Document = str | LongText | TokenIds | None
Line = tuple[Callable[[], str], bytes]  # function that describes its position, and its contents
LONG_FILE = 1 << 24  # bytes; longer text files and lines are read in chunks
LONG_STRING = 1 << 22  # bytes; longer JSON strings of a long line are decoded in chunks
HIGH_OR_LOW_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


def documents(shard: Shard, token: str | None = None) -> Iterator[Document]:
    """All documents of a shard.

    Raises:
        SourceError: a corrupted file.
        SourceChanged: a file has changed since it was listed; raised after the last document at the latest.
        ProfileError: a file lacks the shard's column.
    """
    with unchanged(shard, token):
        yield from READERS[shard.format](shard, token)


def _text(shard: Shard, token: str | None) -> Iterator[Document]:
    for path in shard.paths:
        with open_file(shard, path, token) as file:
            start = file.read(LONG_FILE)
            if len(start) == LONG_FILE:
                yield long_text.of_file(lambda path=path: open_file(shard, path, token), path)
                continue
        try:
            yield start.decode()
        except UnicodeDecodeError as error:
            raise SourceError(f"{path}, byte {error.start}: not UTF-8 text") from error


def _lines(shard: Shard, token: str | None) -> Iterator[Document]:
    for locate, line in _plain_lines(shard, token):
        try:
            text = line.decode().rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise SourceError(f"{locate()}: not UTF-8 text: {error}") from error
        if text and not text.isspace():
            yield text


def _json_lines(shard: Shard, token: str | None) -> Iterator[Document]:
    return _json_texts(shard, LINES[shard.format](shard, token))


def _gzip_lines(shard: Shard, token: str | None) -> Iterator[Line]:
    with _open_compressed(shard, token, "gzip") as file, gzip.open(file) as content:
        yield from _numbered(shard, content, "gzip")


def _zstd_lines(shard: Shard, token: str | None) -> Iterator[Line]:
    import pyarrow

    with _open_compressed(shard, token, "zstd") as file:
        content = io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd"), 1 << 20)
        yield from _numbered(shard, content, "zstd")


def _open_compressed(shard: Shard, token: str | None, compression: str) -> BinaryIO:
    """Open the shard's file; an empty one is an error, which decompressors would read as no lines."""
    file = open_file(shard, shard.paths[0], token)
    if not file.read(1):
        file.close()
        raise SourceError(f"{shard.paths[0]}, byte 0: corrupted {compression}: the file is empty")
    file.seek(0)
    return file


def _plain_lines(shard: Shard, token: str | None) -> Iterator[Line]:
    """Lines that start within the shard's byte range."""
    path, offset = shard.paths[0], shard.start
    with open_file(shard, path, token) as file:
        if offset:
            file.seek(offset - 1)
            offset += len(file.readline()) - 1  # the rest of a line that belongs to the previous shard
        for number, line in enumerate(file, 1):
            if shard.stop is not None and offset >= shard.stop:
                return
            position = f"{path}, line {number}" + (f" after byte {shard.start}" if shard.start else "")
            yield (lambda position=position: position), line
            offset += len(line)


def _numbered(shard: Shard, content: Iterable[bytes], compression: str) -> Iterator[Line]:
    number = 0
    path = shard.paths[0]
    try:
        for number, line in enumerate(content, 1):
            yield (lambda number=number: f"{path}, line {number}"), line
    except (EOFError, OSError, zlib.error) as error:
        if not is_corruption(error):
            raise
        raise SourceError(f"{path}, after line {number}: corrupted {compression}: {error}") from error


def _json_texts(shard: Shard, lines: Iterator[Line]) -> Iterator[Document]:
    columns: dict[str, None] = {}  # an ordered set
    for locate, line in lines:
        if line.isspace():
            continue
        line, long_strings = _extract_long_strings(line)
        record = parse_record(line, locate)
        if shard.column not in columns:
            columns.update(dict.fromkeys(record))
        value = record.get(shard.column)
        if not isinstance(value, str):
            yield None
        elif value in long_strings:
            literal = long_strings[value]
            text = long_text.of_json(literal, locate)
            yield text if not HIGH_OR_LOW_SURROGATE.search(literal) or _is_encodable(text.chunks()) else None
        else:
            yield value if _is_encodable([value]) else None
    if columns:
        require_column(shard, list(columns))


def parse_record(line: bytes, locate: Callable[[], str]) -> dict[str, Any]:
    import orjson

    try:
        record = orjson.loads(line)
    except ValueError:
        try:
            record = json.loads(line)  # also accepts NaN and lone surrogates
        except ValueError as error:
            raise SourceError(f"{locate()}: invalid JSON: {error}") from error
        except RecursionError as error:
            raise SourceError(f"{locate()}: JSON is nested too deeply") from error
    if not isinstance(record, dict):
        raise SourceError(f"{locate()}: not a JSON object")
    return record


def _is_encodable(chunks: Iterable[str]) -> bool:
    """Whether a text has no lone surrogate, which JSON can escape but UTF-8 cannot encode."""
    try:
        for chunk in chunks:
            chunk.encode()
    except UnicodeEncodeError:
        return False
    return True


def _extract_long_strings(line: bytes) -> tuple[bytes, dict[str, memoryview]]:
    """A JSON line with its long strings replaced by names, and their unquoted UTF-8 literals by name.

    A document of hundreds of megabytes is then in memory once, in UTF-8, not also decoded at up to four bytes per character.
    """
    strings: dict[str, memoryview] = {}
    if len(line) < LONG_FILE:
        return line, strings
    parts, offset, view = [], 0, memoryview(line)
    for match in STRING.finditer(line):
        low, high = match.span()
        if high - low >= LONG_STRING:
            name = f"{len(strings)} of {uuid4().hex}"
            parts += [bytes(view[offset:low]), json.dumps(name).encode()]
            strings[name], offset = view[low + 1 : high - 1], high
    return b"".join([*parts, bytes(view[offset:])]), strings


def _python_docs(shard: Shard, _: str | None) -> Iterator[Document]:
    if shard.digest != python_docs.DIGEST:
        reason = "another version of Trainshed listed the data; use the same version on all machines"
        raise SourceError(f"{shard.name}: {reason}")
    return python_docs.documents()


# Readers of lines, for the formats with one JSON object per line.
LINES: dict[str, Callable[[Shard, str | None], Iterator[Line]]] = {
    "jsonl": _plain_lines,
    "jsonl.gz": _gzip_lines,
    "jsonl.zst": _zstd_lines,
}
READERS: dict[str, Callable[[Shard, str | None], Iterator[Document]]] = {
    "python-docs": _python_docs,
    "text": _text,
    "lines": _lines,
    **dict.fromkeys(LINES, _json_lines),
    "parquet": columnar.parquet,
    "arrow": columnar.arrow,
    "tokens": columnar.arrow,
}
