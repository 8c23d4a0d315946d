"""Read tensors from a checkpoint folder: for loading, conversion and comparison.

The folder is torch.distributed.checkpoint's (DCP's): `*.distcp` files of boxes end to end, each one torch.save of a contiguous
tensor, and `.metadata`, a pickle that maps (tensor name, offsets) to (file, offset, length). Only DCP's classes are unpickled.

Local files are mapped into memory: reading a slice costs the slice. From a remote store all of a box is
fetched, or only the rows needed if these are less than a quarter.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.utils import _create_file_view

from parallel.checkpoint.boxes import BoxedTensor
from parallel.checkpoint.locations import Location, filesystem, is_local

REQUESTS = 16  # concurrent requests to a remote store
FETCH_ALL = 1 << 20  # bytes; of a smaller box all is fetched

# Every class and function that the `.metadata` of tensors refers to.
_ALLOWED = {
    *(("torch.distributed.checkpoint.metadata", name) for name in (
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
    )),
    *(("torch", name) for name in ("Size", "float32", "bfloat16", "float16", "float64", "int64", "uint8")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),  # of the folder it was written to
}  # fmt: skip


@dataclass(frozen=True)
class StoredBox:
    """A box of a global tensor in a checkpoint file."""

    # offsets, sizes: the box, in global coordinates
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype  # as stored
    file: str  # name of its file in the checkpoint folder
    # start, length: the bytes of its torch.save in that file
    start: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """A global tensor in a checkpoint: its shape, its type, and the boxes it is stored as."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[StoredBox, ...]


class Reader:
    """Reads the tensors of one checkpoint; its methods may be called from several threads.

    Attributes:
        tensors: by name, with prefix.

    Raises:
        ValueError: `.metadata` is missing, corrupted or refers to anything but DCP's classes and this folder's files.
    """

    def __init__(self, checkpoint: Location) -> None:
        self._files, self._root = filesystem(checkpoint)
        self._local = is_local(self._files)
        self._metadata = self._read_metadata()
        self.tensors = {
            name: self._stored_tensor(name, stored)
            for name, stored in self._metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }
        self._mapped: dict[str, torch.UntypedStorage] = {}  # by file
        self._data_starts: dict[StoredBox, int] = {}

    def map(self, box: StoredBox) -> Tensor:
        """A box of a local checkpoint as a tensor over the memory-mapped file; read-only.

        Raises:
            ValueError: the file is missing or corrupted.
        """
        path = f"{self._root}/{box.file}"
        try:
            if box not in self._data_starts:
                with open(path, "rb") as file:
                    self._data_starts[box] = _data_start(file, box)
            if box.file not in self._mapped:
                size = Path(path).stat().st_size
                self._mapped[box.file] = torch.UntypedStorage.from_file(path, False, size)
            start = self._data_starts[box]
            data = self._mapped[box.file][start : start + math.prod(box.sizes) * box.dtype.itemsize]
            return torch.empty(0, dtype=box.dtype).set_(data).view(box.sizes)
        except (FileNotFoundError, RuntimeError) as error:
            raise ValueError(_broken(path, box, error)) from error

    def read(self, box: StoredBox, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Elements [offsets, offsets + sizes) of a box, in the box's coordinates; read-only.

        Raises:
            ValueError: the file is missing or corrupted.
        """
        if self._local:
            return narrow_tensor_by_index(self.map(box), offsets, sizes)
        path = f"{self._root}/{box.file}"
        try:
            if box.length < FETCH_ALL or 4 * math.prod(sizes) > math.prod(box.sizes):
                data = self._files.cat_file(path, start=box.start, end=box.start + box.length)
                stored = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
                return narrow_tensor_by_index(stored, offsets, sizes)
            row_bytes = math.prod(box.sizes[1:]) * box.dtype.itemsize
            with self._files.open(path, "rb", cache_type="none") as file:
                start = _data_start(file, box) + offsets[0] * row_bytes
            data = bytearray(self._files.cat_file(path, start=start, end=start + sizes[0] * row_bytes))
            rows = torch.frombuffer(data, dtype=box.dtype).view(sizes[0], *box.sizes[1:])
            return narrow_tensor_by_index(rows, (0, *offsets[1:]), sizes)
        except (FileNotFoundError, RuntimeError) as error:
            raise ValueError(_broken(path, box, error)) from error

    def load(self, targets: Mapping[str, BoxedTensor]) -> None:
        """Fill the boxes of `targets`, named as in the checkpoint, from the stored boxes that overlap them.

        Raises:
            ValueError: a file is missing or corrupted.
        """
        reads = [
            (self.tensors[name].boxes[item.storage_index.index], item, target.views[item.dest_index.offset])
            for name, target in targets.items()
            for item in create_read_items_for_chunk_list(
                name, self._metadata.state_dict_metadata[name], target.__create_chunk_list__()
            )
        ]

        def copy(read: tuple[StoredBox, Any, Tensor]) -> None:
            box, item, view = read
            source = self.read(box, item.storage_offsets, item.lengths)
            narrow_tensor_by_index(view.detach(), item.dest_offsets, item.lengths).copy_(source)

        if self._local:
            for read in reads:
                copy(read)
        else:
            with ThreadPoolExecutor(REQUESTS) as threads:
                list(threads.map(copy, reads))

    def _read_metadata(self) -> Metadata:
        path = f"{self._root}/.metadata"
        try:
            data = self._files.cat_file(path)
        except FileNotFoundError:
            raise ValueError(f"{path}: missing; {self._root} is not a checkpoint") from None
        try:
            metadata = _Unpickler(io.BytesIO(data)).load()
        except Exception as error:  # a corrupted pickle raises nearly anything
            raise ValueError(f"{path}: rejected: {error}") from error
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise ValueError(f"{path}: rejected: it is not a checkpoint's metadata")
        return metadata

    def _stored_tensor(self, name: str, stored: TensorStorageMetadata) -> StoredTensor:
        dtype, boxes = stored.properties.dtype, []
        for chunk in stored.chunks:
            info = self._metadata.storage_data.get(MetadataIndex(name, chunk.offsets))
            if info is None or Path(info.relative_path).name != info.relative_path:
                raise ValueError(f"{self._root}/.metadata: no file for {name} at {tuple(chunk.offsets)}")
            position = (info.relative_path, info.offset, info.length)
            boxes.append(StoredBox(tuple(chunk.offsets), tuple(chunk.sizes), dtype, *position))
        return StoredTensor(tuple(stored.size), dtype, tuple(boxes))


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "pathlib._local":  # its name since Python 3.13
            module = "pathlib"
        if (module, name) not in _ALLOWED:
            raise ValueError(f"{module}.{name} is not allowed in a checkpoint's metadata")
        return super().find_class(module, name)


def _data_start(file: IO[bytes], box: StoredBox) -> int:
    """Offset in its file of a box's first element."""
    archive = torch._C.PyTorchFileReader(_create_file_view(file, box.start, box.length))
    needed, found = math.prod(box.sizes) * box.dtype.itemsize, archive.get_record_size("data/0")
    if found != needed:
        raise RuntimeError(f"{found} bytes of elements, {needed} expected")
    return box.start + archive.get_record_offset("data/0")


def _broken(path: str, box: StoredBox, error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{path}: missing"
    return f"{path}: corrupted at byte {box.start}: {error}"
