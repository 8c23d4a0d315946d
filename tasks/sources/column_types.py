"""Finds the column of a shard in a table's schema, and decides by its type how its values are read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from profiles.errors import ProfileError
from tasks.sources.shard import Shard, shown

KINDS = "text (a string or UTF-8 in binary) or, for token ids, a list of integers"


def find(shard: Shard, schema: Any) -> list[str]:
    """Names that lead to the shard's column: its own, or those of its dotted path through structs.

    Raises ProfileError if there is no such column, or its type is neither text nor token ids.
    """
    names = [shard.column] if shard.column in schema.names else shard.column.split(".")
    fields = {field.name: field.type for field in schema}
    kind = None
    for name in names:
        kind = fields.get(name)
        if kind is None:
            raise missing(shard, (name for name, _ in _nested_fields(schema)))
        fields = {field.name: field.type for field in kind} if _is_struct(kind) else {}
    if not _is_readable(kind):
        reason = f"{shown(shard.paths[0])}: the column's type {kind} is not read; it must be {KINDS}"
        readable = [name for name, found in _nested_fields(schema) if _is_readable(found)]
        raise ProfileError("data.text", shard.column, reason, readable)
    return names


def encoding(shard: Shard, schema: Any) -> str:
    """What the shard's digest says of its column's type: "" for types that have always been read.

    Of a shard of records, which has no column: whether a field is binary.

    Raises ProfileError if the type is neither text nor token ids.
    """
    if not shard.column:
        return "decoded " if any(map(_has_binary, schema)) else ""
    kind = schema.field(shard.column).type if shard.column in schema.names else None
    if kind is None:  # no column, or a nested one: an error when it is read, if it is one
        return ""
    find(shard, schema)
    plain = kind.value_type if _types().is_dictionary(kind) else kind
    return "" if is_text(plain) or _types().is_null(plain) or _is_old_list(kind) else "decoded "


def select(batch: Any, names: list[str]) -> Any:
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
        elif _types().is_dictionary(kind) or _types().is_run_end_encoded(kind):
            kind = kind.value_type
        else:
            return kind


def is_text(kind: Any) -> bool:
    types = _types()
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def is_binary(kind: Any) -> bool:
    types = _types()
    kinds = types.is_binary, types.is_large_binary, types.is_binary_view, types.is_fixed_size_binary
    return any(is_kind(kind) for is_kind in kinds)


def missing(shard: Shard, names: Iterable[str]) -> ProfileError:
    """The error of a file without the shard's column."""
    return ProfileError(
        "data.text", shard.column, f"{shown(shard.paths[0])} has no such column", tuple(names)
    )


def _is_readable(kind: Any) -> bool:
    kind = value_type(kind)
    types = _types()
    views = types.is_list_view, types.is_large_list_view
    is_list = _is_old_list(kind) or any(is_kind(kind) for is_kind in views)
    is_ids = is_list and types.is_integer(kind.value_type)
    return is_text(kind) or is_binary(kind) or types.is_null(kind) or is_ids


def _has_binary(field: Any) -> bool:
    """Whether a field has binary values, itself or in structs and lists."""
    kind = value_type(field.type)
    return is_binary(kind) or any(_has_binary(kind.field(i)) for i in range(kind.num_fields))


def _is_old_list(kind: Any) -> bool:
    types = _types()
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _is_struct(kind: Any) -> bool:
    return bool(_types().is_struct(kind))


def _nested_fields(fields: Iterable[Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for field in fields:
        yield f"{prefix}{field.name}", field.type
        if _is_struct(field.type):
            yield from _nested_fields(field.type, f"{prefix}{field.name}.")


def _types() -> Any:
    from pyarrow import types

    return types
