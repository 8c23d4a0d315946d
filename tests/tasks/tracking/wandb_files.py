"""Reads the file of an offline W&B run: LevelDB's log format, whose records are protobuf messages."""

import struct
from collections.abc import Iterator
from pathlib import Path

BLOCK = 32 * 1024
HEADER = struct.Struct("<IHB")  # checksum, length, type
FULL, FIRST, MIDDLE, LAST = range(1, 5)


def records(path: Path) -> Iterator:
    """Messages of a run-*.wandb file."""
    from wandb.proto import wandb_internal_pb2

    data, position, parts = path.read_bytes(), 7, b""
    while position + HEADER.size <= len(data):
        left = BLOCK - position % BLOCK
        if left < HEADER.size:  # padding
            position += left
            continue
        _, length, kind = HEADER.unpack_from(data, position)
        position += HEADER.size
        chunk = data[position : position + length]
        position += length
        parts = chunk if kind in (FULL, FIRST) else parts + chunk
        if kind in (FULL, LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            yield record


def history(path: Path) -> list[dict[str, str]]:
    """Rows that were logged, as JSON text by name."""
    rows = [record.history for record in records(path) if record.WhichOneof("record_type") == "history"]
    return [{item.key or ".".join(item.nested_key): item.value_json for item in row.item} for row in rows]
