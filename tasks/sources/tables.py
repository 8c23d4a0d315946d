"""Reads parquet, arrow and CSV files by row group, record batch and block.

Memory is one batch: a parquet batch is sized to BATCH_BYTES from the metadata of its row group, and a local arrow file is
memory-mapped.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from tasks.sources import column_types
from tasks.sources.shard import Shard, SourceError, is_corruption, local_path, open_file, without_bom

BATCH_BYTES = 1 << 21
MAX_ROWS = 1024  # per batch
# Per batch of a dictionary-encoded column, whose decoded size is not in the metadata.
MAX_DICTIONARY_ROWS = 128
BUFFER = 1 << 20  # bytes per read of a column
SCHEMA_BLOCK = 1 << 16  # bytes per read of a schema
CSV_BLOCK = 1 << 23  # bytes; a record of CSV must fit
TABLES = ("parquet", "arrow", "csv")  # formats that it reads
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
            column_types.find(shard, table.schema_arrow)
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
    for number, batch in enumerate(all_arrow_batches(shard, token)):
        if shard.stop is not None and number >= shard.stop:
            return
        if number >= shard.start:
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
        return column_types.encoding(shard, table.schema_arrow), [
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
    return column_types.encoding(shard, schema)


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
