"""Reads documents from a column of parquet and arrow files, one record at a time.

Positions in messages count from 0, as in pyarrow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from tasks.sources.formats import long_text
from tasks.sources.formats.long_text import LongText
from tasks.sources.shard import Shard, SourceError
from tasks.sources.tables import MAX_ROWS, arrow_batches, parquet_batches, require_column

LONG_VALUE = 1 << 22  # bytes; longer texts are decoded in chunks


@dataclass(frozen=True)
class TokenIds:
    """A document that is already tokenized."""

    values: np.ndarray
    locate: Callable[[], str]  # describes its position, for messages


Value = str | LongText | TokenIds | None


def parquet(shard: Shard, token: str | None) -> Iterator[Value]:
    """Values of the column, by row group. Raises SourceError, or ProfileError if it is missing."""
    for group, first, batch in parquet_batches(shard, token, [shard.column]):
        yield from _values(batch.column(0), f"{shard.paths[0]}, row group {group}", first)


def arrow(shard: Shard, token: str | None) -> Iterator[Value]:
    """Values of the column, by record batch. Raises SourceError, or ProfileError if it is missing."""
    for number, batch in arrow_batches(shard, token):
        require_column(shard, batch.schema.names)
        yield from _values(batch.column(shard.column), f"{shard.paths[0]}, record batch {number}")


def _values(column: Any, position: str, first: int = 0) -> Iterator[Value]:
    """Texts or token ids of an arrow array with records from `first` at `position`; None for other types."""
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
    for low in range(0, len(column), MAX_ROWS):
        part = column.slice(low, MAX_ROWS)
        texts = _short_texts(part) if _is_text(kind) else None
        if texts is not None:
            yield from texts
            continue
        for i, scalar in enumerate(part, first + low):
            yield read(scalar, lambda i=i: f"{position}, record {i}") if scalar.is_valid else None


def _short_texts(column: Any) -> list[str | None] | None:
    """Texts of an array, decoded at once in a fifth of the time; None if one may be long or is invalid."""
    if column.nbytes < LONG_VALUE:
        with suppress(UnicodeDecodeError):
            return column.to_pylist()
    return None


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)


def _text(scalar: Any, locate: Callable[[], str]) -> str | LongText | None:
    import pyarrow

    scalar = scalar.value if isinstance(scalar, pyarrow.DictionaryScalar) else scalar
    data = scalar.as_buffer()
    if data is None:
        return None
    if data.size >= LONG_VALUE:
        return long_text.of_file(lambda: pyarrow.BufferReader(data), locate())
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise SourceError(f"{locate()}, byte {error.start}: not UTF-8 text") from error


def _ids(scalar: Any, locate: Callable[[], str]) -> TokenIds:
    values = scalar.values
    if values.null_count:
        index = values.is_null().to_numpy(zero_copy_only=False).argmax()
        raise SourceError(f"{locate()}, token {index}: null")
    return TokenIds(values.to_numpy(zero_copy_only=False), locate)
