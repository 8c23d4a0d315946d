"""Write the files of a checkpoint folder, in torch.distributed.checkpoint's (DCP's) format.

Ranks save a run's checkpoint with `Writer`, one file per rank. `write_boxes` and `write_metadata` write a checkpoint from one
process, one file at a time, so that conversion can put the boxes that a rank will read into one file, in order.
"""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.serialization import skip_data

from parallel.checkpoint.checksums import SUFFIX, ChecksumFileSystem, FileDescription, describe
from parallel.checkpoint.locations import Location, is_local, name_of
from parallel.checkpoint.object_stores import renew_credentials
from parallel.layout import GlobalBox
from parallel.torch_internals import FakeTensorMode, FsspecWriter, StorageInfo, StoragePrefix


class Writer(FsspecWriter):
    """DCP's writer, with file names that begin with the id of the save, and with checksums of its files."""

    def __init__(self, checkpoint: Location, save_id: str) -> None:
        super().__init__(str(checkpoint))
        self.fs = ChecksumFileSystem()
        self.fs.init_path(self.path)
        renew_credentials(self.fs.fs)
        self.sync_files = is_local(self.fs.fs)  # putting an object is durable by itself
        self.save_id = save_id

    def begin(self, rank: int) -> None:
        """Create the folder and name this rank's file; call it before `write`."""
        self.fs.mkdir(self.path)
        self.prefix = StoragePrefix(f"{self.save_id}_{rank}_")

    def write(self, plan: SavePlan, planner: Any) -> WrittenFiles:
        """Write this rank's file, and its checksums."""
        boxes = self.write_data(dataclasses.replace(plan, storage_data=self.prefix), planner).value()
        described = {}
        for path, checksums in list(self.fs.written.items()):
            table = checksums.table()
            with self.fs.create_stream(path + SUFFIX, "wb") as stream:
                stream.write(table)
                if self.sync_files:
                    stream.flush()
                    os.fsync(stream.fileno())
            described[name_of(path)] = describe(checksums.size, table)
        return WrittenFiles(boxes, described)

    def write_index(self, metadata: Metadata, written: list[WrittenFiles]) -> dict[str, FileDescription]:
        """Write DCP's index, on one rank. Returns the descriptions of all files, for the marker."""
        self.finish(metadata, [each.boxes for each in written])
        index = self.fs.written[f"{self.path}/.metadata.tmp"]
        files = {name: described for each in written for name, described in each.files.items()}
        return {**files, ".metadata": describe(index.size, index.table())}

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()  # DCP's default names the folder, and checkpoints are moved


@dataclass(frozen=True)
class WrittenFiles:
    """What one rank wrote: positions of its boxes, and its files by name."""

    boxes: list[WriteResult]
    files: dict[str, FileDescription]


@dataclass(frozen=True)
class Written:
    """Where a box was written; `dataclasses.asdict` makes JSON of it."""

    item: GlobalBox
    dtype: str
    file: str
    offset: int
    length: int

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        item = values["item"]
        box = GlobalBox(item["name"], *(tuple(item[key]) for key in ("shape", "offsets", "sizes")))
        return cls(**{**values, "item": box})


def write_boxes(
    path: Path,
    boxes: Iterable[tuple[GlobalBox, Tensor]],
    on_write: Callable[[memoryview], None] = lambda data: None,
) -> list[Written]:
    """Write one file of boxes, in order, one tensor at a time and without copies.

    Args:
        on_write: called with all bytes in order, as they are written.
    """
    written = []
    with path.open("wb", buffering=0) as file:
        for box, tensor in boxes:
            assert tuple(tensor.shape) == box.sizes
            offset = file.tell()
            before, after = _envelope(box.sizes, tensor.dtype)
            for data in (memoryview(before), bytes_of(tensor), memoryview(after)):
                on_write(data)
                while data:
                    data = data[file.write(data) :]
            dtype = str(tensor.dtype).removeprefix("torch.")
            written.append(Written(box, dtype, path.name, offset, file.tell() - offset))
    return written


@lru_cache(maxsize=256)
def _envelope(sizes: tuple[int, ...], dtype: torch.dtype) -> tuple[bytes, bytes]:
    """What torch.save writes before and after the bytes of a contiguous tensor.

    The checksum in it is that of zeros; torch.load never checks it.
    """
    with FakeTensorMode():
        tensor = torch.empty(sizes, dtype=dtype)
    buffer = io.BytesIO()
    with skip_data(materialize_fake_tensors=True):
        torch.save(tensor, buffer)
    buffer.seek(0)
    with FakeTensorMode():
        storage = torch.load(buffer, weights_only=True).untyped_storage()
    content = buffer.getbuffer()
    start = storage._checkpoint_offset
    return bytes(content[:start]), bytes(content[start + storage.nbytes() :])


def bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's elements in row-major order; no copy if it is contiguous."""
    return tensor.contiguous().view(torch.uint8).numpy().data.cast("B")


def write_metadata(folder: Path, written: Iterable[Written]) -> None:
    """Write `.metadata` for the boxes of all files."""
    state: dict[str, TensorStorageMetadata] = {}
    results = []
    for each in written:
        box = each.item
        properties = TensorProperties(dtype=getattr(torch, each.dtype))
        stored = state.setdefault(box.name, TensorStorageMetadata(properties, torch.Size(box.shape), []))
        stored.chunks.append(ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)))
        info = StorageInfo(each.file, each.offset, each.length)
        results.append(WriteResult(MetadataIndex(box.name, box.offsets), each.length, info))
    writer = FileSystemWriter(folder)
    writer.set_up_storage_writer(True)
    writer.finish(Metadata({**state}), [results])
