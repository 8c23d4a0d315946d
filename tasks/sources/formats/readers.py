"""Reads the documents of a shard by its format, as a stream in a fixed order.

A document is text (a str, or a LongText if it is long), token ids if the source is already tokenized, or None if a record has no
text or its text cannot be encoded (a lone surrogate): such records are counted, and do not stop a corpus. Contents that do not
match the file's format raise a SourceError with file and position.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, BinaryIO
from uuid import uuid4

from tasks.sources import json_layout, python_docs
from tasks.sources.changes import unchanged
from tasks.sources.formats import columnar, long_text
from tasks.sources.formats.columnar import TokenIds
from tasks.sources.formats.long_text import LongText
from tasks.sources.json_layout import Line
from tasks.sources.shard import Shard, SourceError, is_corruption, open_file, without_bom
from tasks.sources.tables import TABLES, missing_column

Document = str | LongText | TokenIds | None
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
            is_long, mark = len(start) == LONG_FILE, len(start) - len(start := without_bom(start, path))
            if is_long:
                yield long_text.of_file(partial(open_file, shard, path, token), path, mark)
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


def json_records(shard: Shard, token: str | None) -> Iterator[Line]:
    """The lines of JSON Lines, or the records of other JSON, of a shard. Raises SourceError."""
    lines = LINES[shard.format](shard, token)
    return lines if shard.stop is not None else json_layout.records(lines)


def _compressed_lines(shard: Shard, token: str | None) -> Iterator[Line]:
    compression, decompress = DECOMPRESSORS[shard.format.rpartition(".")[2]]
    with _open_compressed(shard, token, compression) as file, decompress(file) as content:
        yield from _numbered(shard, content, compression)


def _zstd(file: BinaryIO) -> io.BufferedReader:
    import pyarrow

    return io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd"), 1 << 20)


class _Streams(io.RawIOBase):
    """A file of compressed streams, one after another.

    bz2.open and lzma.open take what follows a stream for padding, and end there, if it does not begin like another one.
    """

    def __init__(self, file: BinaryIO, create: Callable[[], Any]) -> None:
        self._file, self._create, self._decoder = file, create, create()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Decompress into the buffer. Raises EOFError for an incomplete stream."""
        data = b""
        while not data:
            given = b""
            if self._decoder.eof:  # zeros pad streams
                given = self._decoder.unused_data.lstrip(b"\0")
                while not given:
                    if not (block := self._file.read(1 << 20)):
                        return 0
                    given = block.lstrip(b"\0")
                self._decoder = self._create()
            elif self._decoder.needs_input and not (given := self._file.read(1 << 20)):
                raise EOFError("the file ends within a stream")
            data = self._decoder.decompress(given, len(buffer))
        buffer[: len(data)] = data
        return len(data)


def _streams(create: Callable[[], Any]) -> Callable[[BinaryIO], io.BufferedReader]:
    return lambda file: io.BufferedReader(_Streams(file, create), 1 << 20)


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
            if not offset:
                offset, line = len(line) - len(start := without_bom(line, path)), start
            yield partial(_line_position, path, number, shard.start), line
            offset += len(line)


def _line_position(path: str, number: int, start: int = 0) -> str:
    return f"{path}, line {number}" + (f" after byte {start}" if start else "")


def _numbered(shard: Shard, content: Iterable[bytes], compression: str) -> Iterator[Line]:
    number = 0
    path = shard.paths[0]
    try:
        for number, line in enumerate(content, 1):
            if number == 1:
                line = without_bom(line, path)
            yield partial(_line_position, path, number), line
    except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        if not is_corruption(error):
            raise
        if "too much memory" in str(error):
            reason = (
                f"its {compression} window is too large; compress it again without --long, or with --long=27"
            )
            raise SourceError(f"{path}: {reason}") from error
        raise SourceError(f"{path}, after line {number}: corrupted {compression}: {error}") from error


def _json_texts(shard: Shard, token: str | None) -> Iterator[Document]:
    columns: dict[str, None] = {}  # an ordered set
    for locate, line in json_records(shard, token):
        if line.isspace():
            continue
        line, long_strings = _extract_long_strings(line)
        record = parse_record(line, locate)
        if shard.column not in columns:
            columns.update(dict.fromkeys(_names(record, shard.column.count("."))))
        value = _field(record, shard.column)
        if not isinstance(value, str):
            yield None
        elif value in long_strings:
            literal = long_strings[value]
            text = long_text.of_json(literal, locate)
            yield text if not HIGH_OR_LOW_SURROGATE.search(literal) or _is_encodable(text.chunks()) else None
        else:
            yield value if _is_encodable([value]) else None
    if columns and shard.column not in columns:
        raise missing_column(shard, columns)


def _names(record: dict[str, Any], depth: int, prefix: str = "") -> Iterator[str]:
    """Names of a record's fields, and dotted paths of those nested at most `depth` levels."""
    for name, value in record.items():
        yield f"{prefix}{name}"
        if depth and isinstance(value, dict):
            yield from _names(value, depth - 1, f"{prefix}{name}.")


def _field(record: Any, column: str) -> Any:
    """A record's field by its name, or else by its dotted path; None if there is none."""
    if column in record:
        return record[column]
    for name in column.split("."):
        record = record.get(name) if isinstance(record, dict) else None
    return record


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


# Names of compressions, and what opens them, by extension.
DECOMPRESSORS: dict[str, tuple[str, Callable[[BinaryIO], Any]]] = {
    "gz": ("gzip", gzip.open),
    "zst": ("zstd", _zstd),
    "xz": ("xz", _streams(lzma.LZMADecompressor)),
    "bz2": ("bzip2", _streams(bz2.BZ2Decompressor)),
}
# Readers of lines, for the formats with JSON.
LINES: dict[str, Callable[[Shard, str | None], Iterator[Line]]] = {
    "jsonl": _plain_lines,
    **{f"jsonl.{extension}": _compressed_lines for extension in DECOMPRESSORS},
}
READERS: dict[str, Callable[[Shard, str | None], Iterator[Document]]] = {
    "python-docs": _python_docs,
    "text": _text,
    "lines": _lines,
    **dict.fromkeys(LINES, _json_texts),
    **dict.fromkeys((*TABLES, "tokens"), columnar.values),
}
