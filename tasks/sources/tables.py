"""Reads parquet, arrow and CSV files by row group, record batch and block; finds a shard's column.

Memory is one batch: a parquet batch is sized to BATCH_BYTES from the metadata of its row group, and a local arrow file is
memory-mapped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count, islice
from typing import Any

from profiles.errors import ProfileError
from tasks.sources.shard import Shard, SourceError, is_corruption, local_path, open_file, shown, without_bom

BATCH_BYTES = 1 << 21
MAX_ROWS = 1024  # per batch
# Per batch of a dictionary-encoded column, whose decoded size is not in the metadata.
MAX_DICTIONARY_ROWS = 128
BUFFER = 1 << 20  # bytes per read of a column
SCHEMA_BLOCK = 1 << 16  # bytes per read of a schema
CSV_BLOCK = 1 << 23  # bytes; a record of CSV must fit
TABLES = ("parquet", "arrow", "csv")  # formats that it reads
# Types of columns, by their names in pyarrow.
TEXT = ("string", "large_string", "string_view")
BINARY = ("binary", "large_binary", "binary_view", "fixed_size_binary")
LISTS = ("list", "large_list", "fixed_size_list")  # that have always been read
KINDS = "text (a string or UTF-8 in binary) or, for token ids, a list of integers"  # of columns
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"  # of an arrow stream; only the zeros before arrow 0.15
Batch = tuple[str, int, Any]


def batches(shard: Shard, token: str | None, column: str | None = None) -> Iterator[Batch]:
    """Record batches of a shard, each with its position in the file and its first record's number there.

    Args:
        column: the column to read, or its dotted path; None reads all columns.

    Raises:
        SourceError: a corrupted file.
        ProfileError: it has no such column, or one of another type.
    """
    if shard.format == "parquet":
        return _parquet_batches(shard, token, column)
    return _csv_batches(shard, token) if shard.format == "csv" else _arrow_batches(shard, token)


def _parquet_batches(shard: Shard, token: str | None, column: str | None) -> Iterator[Batch]:
    from pyarrow.parquet import ParquetFile

    path = shard.paths[0]
    with open_file(shard, path, token) as file:
        with source_errors(f"{path}, footer", "parquet"):
            # The defaults (no buffer, pre_buffer) would hold the whole column of a row group in memory.
            table = ParquetFile(file, buffer_size=BUFFER, pre_buffer=False)
        if column:
            find_column(shard, table.schema_arrow)
        for group in range(shard.start, table.num_row_groups if shard.stop is None else shard.stop):
            first, rows = 0, _batch_rows(table, group, column) if column else MAX_DICTIONARY_ROWS
            columns = [column] if column else None
            batches = table.iter_batches(batch_size=rows, row_groups=[group], columns=columns)
            while True:
                with source_errors(f"{path}, row group {group}, from record {first} on", "parquet"):
                    batch = next(batches, None)
                if batch is None:
                    break
                yield f"{path}, row group {group}", first, batch
                first += len(batch)


def _arrow_batches(shard: Shard, token: str | None) -> Iterator[Batch]:
    numbered = enumerate(all_arrow_batches(shard, token))
    for number, batch in islice(numbered, shard.start, shard.stop):
        yield f"{shard.paths[0]}, record batch {number}", 0, batch


def all_arrow_batches(shard: Shard, token: str | None = None) -> Iterator[Any]:
    """Record batches of an arrow file or stream. Raises SourceError, also for a stream without end marker."""
    import pyarrow

    path = shard.paths[0]
    local = local_path(path)
    with source_errors(path, "arrow file"):
        file = pyarrow.memory_map(str(local)) if local else open_file(shard, path, token)
    with file:
        magic = file.read(6)
        file.seek(0)
        if magic != b"ARROW1":
            yield from _stream_batches(file, path)
            return
        with source_errors(f"{path}, footer", "arrow file"):
            reader = pyarrow.ipc.open_file(file)
        for i in range(reader.num_record_batches):
            with source_errors(f"{path}, record batch {i}", "arrow file"):
                batch = reader.get_batch(i)
            yield batch


def _stream_batches(file: Any, path: str) -> Iterator[Any]:
    import pyarrow

    with source_errors(f"{path}, schema", "arrow file"):
        reader = pyarrow.ipc.open_stream(file)
    number = 0
    while True:
        offset = file.tell()
        with source_errors(f"{path}, record batch {number}", "arrow file"):
            try:
                batch = reader.read_next_batch()
            except StopIteration:
                break
        yield batch
        number += 1
    file.seek(offset)
    if file.read(len(END_OF_STREAM)) not in (END_OF_STREAM, END_OF_STREAM[4:]):
        raise SourceError(f"{path}, record batch {number}: truncated: the end of the stream is missing")


def parquet_layout(shard: Shard, token: str | None) -> tuple[str, list[int]]:
    """Encoding of the shard's column, and its uncompressed bytes in each row group of a parquet file.

    Raises:
        SourceError: a corrupted file.
        ProfileError: the column is neither text nor token ids.
    """
    from pyarrow.parquet import ParquetFile

    path = shard.paths[0]
    with open_file(shard, path, token) as file, source_errors(f"{path}, footer", "parquet"):
        table = ParquetFile(file)
        return _encoding(shard, table.schema_arrow), [
            sum(chunk.total_uncompressed_size for chunk in _column_chunks(table, group, shard.column))
            for group in range(table.num_row_groups)
        ]


def arrow_encoding(shard: Shard, token: str | None) -> str:
    """Encoding of the shard's column in an arrow file; "" if the file is corrupted, which reading reports.

    Raises ProfileError if the column is neither text nor token ids.
    """
    import pyarrow

    with open_file(shard, shard.paths[0], token, block=SCHEMA_BLOCK) as file:
        if file.read(8)[:6] != b"ARROW1":  # before a file's schema, which is that of a stream
            file.seek(0)
        try:
            schema = pyarrow.ipc.read_schema(pyarrow.ipc.read_message(file))
        except (pyarrow.ArrowException, EOFError, OSError) as error:
            if not is_corruption(error):
                raise
            return ""
    return _encoding(shard, schema)


def _csv_batches(shard: Shard, token: str | None) -> Iterator[Batch]:
    """Record batches of a CSV file with a header, all columns as text."""
    import pyarrow
    from pyarrow import csv

    path = shard.paths[0]
    parse, read = csv.ParseOptions(newlines_in_values=True), csv.ReadOptions(block_size=CSV_BLOCK)
    with open_file(shard, path, token) as file, source_errors(f"{path}, block 0", "CSV"):
        without_bom(file.read(4), path)
        file.seek(0)
        names = csv.open_csv(file, read, parse).schema.names
    if len(set(names)) < len(names):
        raise SourceError(f"{path}, line 1: two columns have the same name; rename one")
    convert = csv.ConvertOptions(column_types=dict.fromkeys(names, pyarrow.string()))
    with open_file(shard, path, token) as file:
        with source_errors(f"{path}, block 0", "CSV"):
            batches = csv.open_csv(file, read, parse, convert)
        for number in count():
            with source_errors(f"{path}, block {number}", "CSV"):
                batch = next(batches, None)
            if batch is None:
                return
            yield f"{path}, block {number}", 0, batch


@contextmanager
def source_errors(position: str, kind: str) -> Iterator[None]:
    """Convert errors in a file's contents to a SourceError with the position."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        if not is_corruption(error):
            raise
        raise SourceError(f"{position}: corrupted {kind}: {error}") from error


def _column_chunks(table: Any, group: int, column: str) -> list[Any]:
    """Metadata of a column's chunks in a row group, nested columns by their dotted path.

    The column "" stands for all of them.
    """
    metadata = table.metadata.row_group(group)
    chunks = (metadata.column(i) for i in range(metadata.num_columns))
    return [chunk for chunk in chunks if not column or f"{chunk.path_in_schema}.".startswith(f"{column}.")]


def _batch_rows(table: Any, group: int, column: str) -> int:
    """Number of records of a row group that make up BATCH_BYTES."""
    chunks = _column_chunks(table, group, column)
    size: int = sum(chunk.total_uncompressed_size for chunk in chunks)
    limit = MAX_DICTIONARY_ROWS if any(chunk.has_dictionary_page for chunk in chunks) else MAX_ROWS
    rows: int = table.metadata.row_group(group).num_rows
    return max(1, min(limit, BATCH_BYTES * rows // max(1, size)))


def find_column(shard: Shard, schema: Any) -> list[str]:
    """Names that lead to the shard's column: its own, or those of its dotted path through structs.

    Raises ProfileError if there is no such column, or its type is neither text nor token ids.
    """
    names = [shard.column] if shard.column in schema.names else shard.column.split(".")
    fields = {field.name: field.type for field in schema}
    kind = None
    for name in names:
        kind = fields.get(name)
        if kind is None:
            raise missing_column(shard, (name for name, _ in _nested_fields(schema)))
        fields = {field.name: field.type for field in kind} if is_any(kind, "struct") else {}
    if not _is_readable(kind):
        reason = f"{shown(shard.paths[0])}: the column's type {kind} is not read; it must be {KINDS}"
        readable = [name for name, found in _nested_fields(schema) if _is_readable(found)]
        raise ProfileError("data.text", shard.column, reason, readable)
    return names


def _encoding(shard: Shard, schema: Any) -> str:
    """What the shard's digest says of its column's type: "" for types that have always been read.

    Of a shard of records, which has no column: whether a field is binary.

    Raises ProfileError if the type is neither text nor token ids.
    """
    if not shard.column:
        return "decoded " if any(map(_has_binary, schema)) else ""
    kind = schema.field(shard.column).type if shard.column in schema.names else None
    if kind is None:  # no column, or a nested one: an error when it is read, if it is one
        return ""
    find_column(shard, schema)
    plain = kind.value_type if is_any(kind, "dictionary") else kind
    return "" if is_any(plain, *TEXT, "null") or is_any(kind, *LISTS) else "decoded "


def select_column(batch: Any, names: list[str]) -> Any:
    """The column of a record batch, without run-end encoding and extension types."""
    import pyarrow
    import pyarrow.compute

    column = batch.column(names[0])
    if names[1:]:
        column = pyarrow.compute.struct_field(column, names[1:])
    while isinstance(column, pyarrow.ExtensionArray):
        column = column.storage
    return column


def value_type(kind: Any) -> Any:
    """The type of a column's values, without dictionary or run-end encoding and extension types."""
    import pyarrow

    while True:
        if isinstance(kind, pyarrow.BaseExtensionType):
            kind = kind.storage_type
        elif is_any(kind, "dictionary", "run_end_encoded"):
            kind = kind.value_type
        else:
            return kind


def is_any(kind: Any, *names: str) -> bool:
    """Whether a type is one of those with these names in pyarrow."""
    from pyarrow import types

    return any(getattr(types, f"is_{name}")(kind) for name in names)


def missing_column(shard: Shard, names: Iterable[str]) -> ProfileError:
    """The error of a file without the shard's column."""
    return ProfileError(
        "data.text", shard.column, f"{shown(shard.paths[0])} has no such column", tuple(names)
    )


def _is_readable(kind: Any) -> bool:
    kind = value_type(kind)
    is_list = is_any(kind, *LISTS, "list_view", "large_list_view")
    return is_any(kind, *TEXT, *BINARY, "null") or (is_list and is_any(kind.value_type, "integer"))


def _has_binary(field: Any) -> bool:
    """Whether a field has binary values, itself or in structs and lists."""
    kind = value_type(field.type)
    return is_any(kind, *BINARY) or any(_has_binary(kind.field(i)) for i in range(kind.num_fields))


def _nested_fields(fields: Iterable[Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for field in fields:
        yield f"{prefix}{field.name}", field.type
        if is_any(field.type, "struct"):
            yield from _nested_fields(field.type, f"{prefix}{field.name}.")
