"""Documents in the columns of parquet and arrow files, a record at a time.

Memory is that of the records under way: a batch of parquet has as many as make BATCH_BYTES by what the file says of its
row group, and an arrow file that is here is mapped. Places are counted from 0, as pyarrow counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from profiles.errors import ProfileError
from tasks.sources import long_text
from tasks.sources.long_text import LongText
from tasks.sources.shard import Shard, SourceError, is_damage, local_path, open_file

BATCH_BYTES = 1 << 21
ROWS = 1024  # records at a time, at most
REPEATED_ROWS = 128  # the same, of a column whose values are in a dictionary: the file does not say how often it names each
BUFFER = 1 << 20  # bytes of a column that are read at once
LONG_VALUE = 1 << 22  # bytes; longer texts are decoded as they are read
END = b"\xff\xff\xff\xff\0\0\0\0"  # of an arrow stream; before arrow 0.15 the zeros alone


@dataclass(frozen=True)
class Ids:
    """A document that has its tokens already.

    Attributes:
        values: the tokens' ids.
        place: where it is, in words.
    """

    values: np.ndarray
    place: Callable[[], str]


Value = str | LongText | Ids | None


def parquet(shard: Shard, token: str | None) -> Iterator[Value]:
    """What is in the shard's column, row group by row group.

    Raises:
        SourceError: a damaged file. ProfileError: no such column.
    """
    from pyarrow.parquet import ParquetFile

    path = shard.paths[0]
    with open_file(shard, path, token) as file:
        with refusing(f"{path}, footer", "parquet"):
            # Without a buffer, and read ahead, whole columns of a row group would be in memory.
            table = ParquetFile(file, buffer_size=BUFFER, pre_buffer=False)
        require_column(shard, table.schema_arrow.names)
        for group in range(shard.start, table.num_row_groups if shard.stop is None else shard.stop):
            number = 0
            where = f"{path}, row group {group}"
            options = {"row_groups": [group], "columns": [shard.column]}
            batches = table.iter_batches(batch_size=_rows(table, group, shard.column), **options)
            while True:
                with refusing(f"{where}, from record {number} on", "parquet"):
                    batch = next(batches, None)
                if batch is None:
                    break
                yield from _values(batch.column(0), where, number)
                number += len(batch)


def arrow(shard: Shard, token: str | None) -> Iterator[Value]:
    """What is in the shard's column, record batch by record batch.

    Raises:
        SourceError: a damaged file. ProfileError: no such column.
    """
    for number, batch in enumerate(arrow_batches(shard, token)):
        if shard.stop is not None and number >= shard.stop:
            return
        if number >= shard.start:
            require_column(shard, batch.schema.names)
            yield from _values(batch.column(shard.column), f"{shard.paths[0]}, record batch {number}")


def arrow_batches(shard: Shard, token: str | None = None) -> Iterator[Any]:
    """The record batches of an arrow file, in either of its two forms.

    Raises:
        SourceError: a damaged file, or a stream without its end, whose last batches may be gone.
    """
    import pyarrow

    path = shard.paths[0]
    local = local_path(path)
    with refusing(path, "arrow file"):
        file = pyarrow.memory_map(str(local)) if local else open_file(shard, path, token)
    with file:
        magic = file.read(6)
        file.seek(0)
        if magic != b"ARROW1":
            yield from _streamed(file, path)
            return
        with refusing(f"{path}, footer", "arrow file"):
            reader = pyarrow.ipc.open_file(file)
        for i in range(reader.num_record_batches):
            with refusing(f"{path}, record batch {i}", "arrow file"):
                batch = reader.get_batch(i)
            yield batch


def _streamed(file: Any, path: str) -> Iterator[Any]:
    import pyarrow

    with refusing(f"{path}, schema", "arrow file"):
        reader = pyarrow.ipc.open_stream(file)
    number = 0
    while True:
        at = file.tell()
        with refusing(f"{path}, record batch {number}", "arrow file"):
            try:
                batch = reader.read_next_batch()
            except StopIteration:
                break
        yield batch
        number += 1
    file.seek(at)
    if file.read(len(END)) not in (END, END[4:]):
        raise SourceError(f"{path}, record batch {number}: the stream's end is missing: truncated")


def row_groups(shard: Shard, token: str | None) -> list[int]:
    """Bytes of the column in each row group of a parquet file, uncompressed.

    Raises:
        SourceError: a damaged file.
    """
    from pyarrow.parquet import ParquetFile

    with open_file(shard, shard.paths[0], token) as file, refusing(f"{shard.paths[0]}, footer", "parquet"):
        table = ParquetFile(file)
        return [
            sum(chunk.total_uncompressed_size for chunk in _chunks(table, group, shard.column))
            for group in range(table.num_row_groups)
        ]


@contextmanager
def refusing(place: str, kind: str) -> Iterator[None]:
    """What the block reads, refused by its place where it is damaged."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        if not is_damage(error):
            raise
        raise SourceError(f"{place}: damaged {kind}: {error}") from error


def require_column(shard: Shard, columns: list[str]) -> None:
    if shard.column not in columns:
        raise ProfileError("data.text", shard.column, f"{shard.paths[0]} has no such column", tuple(columns))


def _chunks(table: Any, group: int, column: str) -> list[Any]:
    """What the file says of a column in a row group."""
    about = table.metadata.row_group(group)
    chunks = (about.column(i) for i in range(about.num_columns))
    return [chunk for chunk in chunks if chunk.path_in_schema.partition(".")[0] == column]


def _rows(table: Any, group: int, column: str) -> int:
    """How many records of a row group make BATCH_BYTES."""
    chunks = _chunks(table, group, column)
    size = sum(chunk.total_uncompressed_size for chunk in chunks)
    most = REPEATED_ROWS if any(chunk.has_dictionary_page for chunk in chunks) else ROWS
    rows = table.metadata.row_group(group).num_rows
    return max(1, min(most, BATCH_BYTES * rows // max(1, size)))


def _values(column: Any, where: str, first: int = 0) -> Iterator[Value]:
    """Texts, or rows of token ids, of an arrow array; None for all else.

    Args:
        where: what holds the array, in words.
        first: number of its first record there.
    """
    from pyarrow import types

    kind = column.type
    lists = types.is_list, types.is_large_list, types.is_fixed_size_list
    if _is_text(kind) or (types.is_dictionary(kind) and _is_text(kind.value_type)):
        read = _text
    elif any(is_kind(kind) for is_kind in lists) and types.is_integer(kind.value_type):
        read = _ids
    else:
        yield from (None for _ in range(len(column)))
        return
    for low in range(0, len(column), ROWS):
        part = column.slice(low, ROWS)
        texts = _short_texts(part) if _is_text(kind) else None
        if texts is not None:
            yield from texts
            continue
        for i, scalar in enumerate(part, first + low):
            yield read(scalar, lambda i=i: f"{where}, record {i}") if scalar.is_valid else None


def _short_texts(column: Any) -> list[str | None] | None:
    """All texts of an array at once, in a fifth of the time; None where one is long, or is damaged."""
    if column.nbytes < LONG_VALUE:
        with suppress(UnicodeDecodeError):
            return column.to_pylist()
    return None


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)


def _text(scalar: Any, place: Callable[[], str]) -> str | LongText | None:
    import pyarrow

    scalar = scalar.value if isinstance(scalar, pyarrow.DictionaryScalar) else scalar
    data = scalar.as_buffer()
    if data is None:
        return None
    if data.size >= LONG_VALUE:
        return long_text.of_file(lambda: pyarrow.BufferReader(data), place())
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise SourceError(f"{place()}, byte {error.start}: is not UTF-8 text") from error


def _ids(scalar: Any, place: Callable[[], str]) -> Ids:
    values = scalar.values
    if values.null_count:
        at = values.is_null().to_numpy(zero_copy_only=False).argmax()
        raise SourceError(f"{place()}, token {at}: is null")
    return Ids(values.to_numpy(zero_copy_only=False), place)
