"""The documents of a shard, by its format, read as a stream in an order that never changes.

A document is text (a str, or a LongText where a file is one), token ids where the source is tokenized already, or None where a
record has no text. What a file's name promises and its contents do not hold is refused by file and place.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from uuid import uuid4

import numpy as np

from profiles.errors import ProfileError
from tasks import long_text, python_docs
from tasks.long_text import LongText
from tasks.shard import Shard, SourceError, local_path, open_file

Document = str | LongText | np.ndarray | None
LONG_FILE = 1 << 24  # bytes; longer files of plain text are read in chunks
LONG_STRING = 1 << 22  # bytes
STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
ROWS = 1024  # records of a parquet or arrow file at a time


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
        with open_file(shard, shard.paths[0], token) as file, gzip.open(file) as content:
            yield from _numbered(shard, content, "gzip")

    return _json_texts(shard, lines())


def _zstd_json_lines(shard: Shard, token: str | None) -> Iterator[Document]:
    def lines() -> Iterator[Line]:
        import pyarrow

        with open_file(shard, shard.paths[0], token) as file:
            content = io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd"), 1 << 20)
            yield from _numbered(shard, content, "zstd")

    return _json_texts(shard, lines())


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
    import orjson

    columns: dict[str, None] = {}  # an ordered set
    for place, line in lines:
        if line.isspace():
            continue
        short, long = _without_long_strings(line)
        try:
            record = orjson.loads(short)
        except ValueError:
            try:
                record = json.loads(short)  # which takes NaN, as Python writes it
            except ValueError as error:
                raise SourceError(f"{place()}: is not JSON: {error}") from error
        if not isinstance(record, dict):
            raise SourceError(f"{place()}: is no JSON object")
        if shard.column not in columns:
            columns.update(dict.fromkeys(record))
        value = record.get(shard.column)
        if isinstance(value, str) and value in long:
            yield long_text.of_json(long[value], place)
        else:
            yield value if isinstance(value, str) else None
    if columns:
        _require_column(shard, list(columns))


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


def _parquet(shard: Shard, token: str | None) -> Iterator[Document]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    with open_file(shard, shard.paths[0], token) as file:
        try:
            table = ParquetFile(file)
            _require_column(shard, table.schema_arrow.names)
            groups = range(shard.start, table.num_row_groups if shard.stop is None else shard.stop)
            for batch in table.iter_batches(batch_size=ROWS, row_groups=list(groups), columns=[shard.column]):
                yield from _values(batch.column(0))
        except (pyarrow.ArrowException, OSError) as error:
            if not is_damage(error):
                raise
            raise SourceError(f"{shard.paths[0]}: damaged parquet: {error}") from error


def _arrow(shard: Shard, token: str | None) -> Iterator[Document]:
    import pyarrow

    try:
        for number, batch in enumerate(arrow_batches(shard, token)):
            if shard.stop is not None and number >= shard.stop:
                return
            if number >= shard.start:
                _require_column(shard, batch.schema.names)
                column = batch.column(shard.column)
                for at in range(0, len(column), ROWS):
                    yield from _values(column.slice(at, ROWS))
    except (pyarrow.ArrowException, OSError) as error:
        if not is_damage(error):
            raise
        raise SourceError(f"{shard.paths[0]}: damaged arrow file: {error}") from error


def arrow_batches(shard: Shard, token: str | None = None) -> Iterator[Any]:
    """The record batches of an arrow file, in either of its two forms."""
    import pyarrow

    path = local_path(shard.paths[0])
    file = pyarrow.memory_map(str(path)) if path else open_file(shard, shard.paths[0], token)
    with file:
        magic = file.read(6)
        file.seek(0)
        if magic != b"ARROW1":
            yield from pyarrow.ipc.open_stream(file)
            return
        reader = pyarrow.ipc.open_file(file)
        for i in range(reader.num_record_batches):
            yield reader.get_batch(i)


def _values(column: Any) -> Iterator[Document]:
    """Texts, or rows of token ids, of an arrow array; None for all else."""
    from pyarrow import types

    kind = column.type
    lists = types.is_list, types.is_large_list, types.is_fixed_size_list
    if types.is_string(kind) or types.is_large_string(kind):
        yield from column.to_pylist()
    elif any(is_kind(kind) for is_kind in lists) and types.is_integer(kind.value_type):
        for i in range(len(column)):
            yield column[i].values.to_numpy(zero_copy_only=False) if column[i].is_valid else None
    else:
        yield from (None for _ in range(len(column)))


def is_damage(error: Exception) -> bool:
    """Whether an error is the file's contents', and not one of the network, the disk or its rights."""
    if isinstance(error, ConnectionError | TimeoutError | FileNotFoundError | PermissionError):
        return False
    return not isinstance(error, OSError) or error.errno is None


def _require_column(shard: Shard, columns: list[str]) -> None:
    if shard.column not in columns:
        raise ProfileError("data.text", shard.column, f"{shard.paths[0]} has no such column", tuple(columns))


READERS: dict[str, Callable[[Shard, str | None], Iterator[Document]]] = {
    "python-docs": _python_docs,
    "text": _text,
    "lines": _lines,
    "jsonl": _json_lines,
    "jsonl.gz": _gzip_json_lines,
    "jsonl.zst": _zstd_json_lines,
    "parquet": _parquet,
    "arrow": _arrow,
    "tokens": _arrow,
}
