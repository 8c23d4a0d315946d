"""The documents of a shard, by its format, read as a stream in an order that never changes.

A document is text (a str, or a LongText where it is long), token ids where the source is tokenized already, or None where a
record has no text, or one that no encoding has: a corpus of the web does not end at such a line, which is counted. What a
file's name promises and its contents do not hold is refused by file and place.
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

from tasks.sources import columnar, long_text, python_docs
from tasks.sources.columnar import Ids
from tasks.sources.long_text import LongText
from tasks.sources.shard import Shard, SourceError, is_damage, open_file

Document = str | LongText | Ids | None
LONG_FILE = 1 << 24  # bytes; longer files of plain text are read in chunks
LONG_STRING = 1 << 22  # bytes
HALF = re.compile(rb"\\u[dD][89a-fA-F]")  # of a surrogate pair
STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


def documents(shard: Shard, token: str | None = None) -> Iterator[Document]:
    """All documents of a shard; `token` is the hub's.

    Raises:
        SourceError: a damaged file.
        ProfileError: a file without the shard's column.
    """
    return READERS[shard.format](shard, token)


def _python_docs(shard: Shard, token: str | None) -> Iterator[Document]:
    return python_docs.documents()


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
            raise SourceError(f"{path}, byte {error.start}: is not UTF-8 text") from error


def _lines(shard: Shard, token: str | None) -> Iterator[Document]:
    for place, line in _plain_lines(shard, token):
        try:
            text = line.decode().rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise SourceError(f"{place()}: is not UTF-8 text: {error}") from error
        if text and not text.isspace():
            yield text


def _json_lines(shard: Shard, token: str | None) -> Iterator[Document]:
    return _json_texts(shard, _plain_lines(shard, token))


def _gzip_json_lines(shard: Shard, token: str | None) -> Iterator[Document]:
    def lines() -> Iterator[Line]:
        with _compressed(shard, token, "gzip") as file, gzip.open(file) as content:
            yield from _numbered(shard, content, "gzip")

    return _json_texts(shard, lines())


def _zstd_json_lines(shard: Shard, token: str | None) -> Iterator[Document]:
    def lines() -> Iterator[Line]:
        import pyarrow

        with _compressed(shard, token, "zstd") as file:
            content = io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd"), 1 << 20)
            yield from _numbered(shard, content, "zstd")

    return _json_texts(shard, lines())


def _compressed(shard: Shard, token: str | None, compression: str) -> BinaryIO:
    """The shard's file, which is not empty: its reader would take one of no bytes for one of no lines."""
    file = open_file(shard, shard.paths[0], token)
    if not file.read(1):
        file.close()
        raise SourceError(f"{shard.paths[0]}, byte 0: damaged {compression}: the file is empty")
    file.seek(0)
    return file


Line = tuple[Callable[[], str], bytes]  # where it is, in words, and what it holds


def _plain_lines(shard: Shard, token: str | None) -> Iterator[Line]:
    """The lines that start in the shard's bytes."""
    path, at = shard.paths[0], shard.start
    with open_file(shard, path, token) as file:
        if at:
            file.seek(at - 1)
            at += len(file.readline()) - 1  # the rest of a line that another shard has
        for number, line in enumerate(file, 1):
            if shard.stop is not None and at >= shard.stop:
                return
            where = f"{path}, line {number}" + (f" after byte {shard.start}" if shard.start else "")
            yield (lambda where=where: where), line
            at += len(line)


def _numbered(shard: Shard, content: Iterable[bytes], compression: str) -> Iterator[Line]:
    number = 0
    path = shard.paths[0]
    try:
        for number, line in enumerate(content, 1):
            yield (lambda number=number: f"{path}, line {number}"), line
    except (EOFError, OSError, zlib.error) as error:
        if not is_damage(error):
            raise
        raise SourceError(f"{path}, after line {number}: damaged {compression}: {error}") from error


def _json_texts(shard: Shard, lines: Iterator[Line]) -> Iterator[Document]:
    columns: dict[str, None] = {}  # an ordered set
    for place, line in lines:
        if line.isspace():
            continue
        short, long = _without_long_strings(line)
        record = _record(short, place)
        if shard.column not in columns:
            columns.update(dict.fromkeys(record))
        value = record.get(shard.column)
        if not isinstance(value, str):
            yield None
        elif value in long:
            text = long_text.of_json(long[value], place)
            yield text if not HALF.search(long[value]) or _is_unicode(text.chunks()) else None
        else:
            yield value if _is_unicode([value]) else None
    if columns:
        columnar.require_column(shard, list(columns))


def _record(line: bytes, place: Callable[[], str]) -> dict[str, Any]:
    import orjson

    try:
        record = orjson.loads(line)
    except ValueError:
        try:
            record = json.loads(line)  # which takes NaN, as Python writes it, and halves of surrogate pairs
        except ValueError as error:
            raise SourceError(f"{place()}: is not JSON: {error}") from error
        except RecursionError as error:
            raise SourceError(f"{place()}: is JSON nested too deeply to be read") from error
    if not isinstance(record, dict):
        raise SourceError(f"{place()}: is no JSON object")
    return record


def _is_unicode(chunks: Iterable[str]) -> bool:
    """Whether no half of a surrogate pair stands alone in a text: JSON can say it, and nothing can encode it."""
    try:
        for chunk in chunks:
            chunk.encode()
    except UnicodeEncodeError:
        return False
    return True


def _without_long_strings(line: bytes) -> tuple[bytes, dict[str, memoryview]]:
    """A line of JSON in which names stand for its long strings, and these by their names, as JSON has them, without quotes.

    So a document of hundreds of megabytes is in memory once, in UTF-8, and not decoded as well, in up to four bytes a character.
    """
    long: dict[str, memoryview] = {}
    if len(line) < LONG_FILE:
        return line, long
    parts, at, whole = [], 0, memoryview(line)
    for found in STRING.finditer(line):
        low, high = found.span()
        if high - low >= LONG_STRING:
            name = f"{len(long)} of {uuid4().hex}"
            parts += [bytes(whole[at:low]), json.dumps(name).encode()]
            long[name], at = whole[low + 1 : high - 1], high
    return b"".join([*parts, bytes(whole[at:])]), long


READERS: dict[str, Callable[[Shard, str | None], Iterator[Document]]] = {
    "python-docs": _python_docs,
    "text": _text,
    "lines": _lines,
    "jsonl": _json_lines,
    "jsonl.gz": _gzip_json_lines,
    "jsonl.zst": _zstd_json_lines,
    "parquet": columnar.parquet,
    "arrow": columnar.arrow,
    "tokens": columnar.arrow,
}
