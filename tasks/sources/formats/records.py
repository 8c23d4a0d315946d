"""Reads a shard's records with all fields, for objectives that train on several fields of a record."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from profiles.schema import Source
from tasks.sources import listing, python_docs
from tasks.sources.changes import unchanged
from tasks.sources.files import file_format
from tasks.sources.formats.readers import LINES, json_records, parse_record
from tasks.sources.shard import Shard, SourceError
from tasks.sources.tables import TABLES, batches

if TYPE_CHECKING:
    from pyarrow import RecordBatch

Record = dict[str, Any]
Located = tuple[Record, Callable[[], str]]  # a record, and a function that describes its position


def records(shard: Shard, token: str | None = None) -> Iterator[Located]:
    """All records of a shard, in order. Raises SourceError for a corrupted file, or one without records."""
    with unchanged(shard, token):
        if shard.format in LINES:
            for locate, line in json_records(shard, token):
                if not line.isspace():
                    yield parse_record(line, locate), locate
        elif shard.format == "python-docs":
            yield from ((record, lambda: shard.name) for record in python_docs.records())
        elif shard.format in TABLES:
            for position, _, batch in batches(shard, token):
                yield from _located(batch, position)
        else:
            raise SourceError(
                f"{shard.name}: format {shard.format} has no records; use JSON lines or parquet"
            )


def first_local(source: Source, key: str) -> Record | None:
    """The first record of a source that is files of this machine; None if it has none, or is elsewhere.

    Raises:
        ProfileError: for the source's key in the profile, if no file matches.
        SourceError: a corrupted file.
    """
    if source.kind != "files" or "://" in (source.path or "://"):
        return None
    paths = listing.list_files(source, f"{key}.path")
    kind = file_format(paths[0]) or ""
    shard = Shard(paths[0], kind, "", paths=(paths[0],), column=source.text or "")
    return next((record for record, _ in records(shard)), None)


def _located(batch: RecordBatch, position: str) -> Iterator[Located]:
    try:
        records = batch.to_pylist()
    except UnicodeDecodeError as error:
        raise SourceError(f"{position}: not UTF-8 text: {error}") from error
    for record in records:
        yield {name: _plain(value) for name, value in record.items()}, lambda: position


def _plain(value: Any) -> Any:
    """A value as JSON would give it: UTF-8 in binary as text, and without the nulls of structs.

    A struct has every field that one of its column's structs has. Other binary values, such as images, stay as they are.
    """
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items() if each is not None}
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return value
    return [_plain(each) for each in value] if isinstance(value, list) else value
