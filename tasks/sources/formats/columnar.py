"""Reads documents from a column of parquet, arrow and CSV files, one record at a time.

Positions in messages count from 0, as in pyarrow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tasks.sources import tables
from tasks.sources.formats import long_text
from tasks.sources.formats.long_text import LongText
from tasks.sources.shard import Shard, SourceError

LONG_VALUE = 1 << 22  # bytes; longer texts are decoded in chunks


@dataclass(frozen=True)
class TokenIds:
    """A document that is already tokenized."""

    values: np.ndarray
    locate: Callable[[], str]  # describes its position, for messages


Value = str | LongText | TokenIds | None


def values(shard: Shard, token: str | None) -> Iterator[Value]:
    """Values of the column. Raises SourceError, or ProfileError if it is missing or no text."""
    for position, first, batch in tables.batches(shard, token, shard.column):
        column = tables.select_column(batch, tables.find_column(shard, batch.schema))
        yield from _values(column, position, first)


def _values(column: Any, position: str, first: int) -> Iterator[Value]:
    """Texts or token ids of an arrow array with records from `first` at `position`."""
    import pyarrow.compute
    from pyarrow import types

    kind = tables.value_type(column.type)
    read = _text if tables.is_any(kind, *tables.TEXT, *tables.BINARY) else _ids
    for low in range(0, len(column), tables.MAX_ROWS):
        part = column.slice(low, tables.MAX_ROWS)
        if types.is_run_end_encoded(part.type):
            part = pyarrow.compute.run_end_decode(part)
        texts = _short_texts(part)
        if texts is not None:
            yield from texts
            continue
        for i, scalar in enumerate(part, first + low):
            scalar = scalar.value if isinstance(scalar, pyarrow.DictionaryScalar) else scalar
            yield read(scalar, partial("{}, record {}".format, position, i)) if scalar.is_valid else None


def _short_texts(column: Any) -> list[str | None] | None:
    """Texts of an array, decoded at once in a fifth of the time; None if one may be long or is invalid."""
    import pyarrow

    strings = {
        pyarrow.binary(): pyarrow.string(),
        pyarrow.large_binary(): pyarrow.large_string(),
        pyarrow.binary_view(): pyarrow.string_view(),
    }
    if (kind := strings.get(column.type)) is not None:
        column = column.view(kind)  # not checked until it is decoded
    if tables.is_any(column.type, *tables.TEXT) and column.nbytes < LONG_VALUE:
        with suppress(UnicodeDecodeError):
            texts: list[str | None] = column.to_pylist()
            return texts
    return None


def _text(scalar: Any, locate: Callable[[], str]) -> str | LongText | None:
    import pyarrow

    data = scalar.as_buffer()
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
