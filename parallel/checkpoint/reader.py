"""Read tensors from a checkpoint folder: for loading, conversion and comparison.

The folder is torch.distributed.checkpoint's (DCP's): `*.distcp` files of boxes end to end, each one torch.save of a contiguous
tensor, and `.metadata`, a pickle that maps (tensor name, offsets) to (file, offset, length). Only DCP's classes are unpickled.

Local files are mapped into memory: reading a slice costs the slice. From a remote store, small boxes and boxes that are needed
almost entirely are fetched in full, of others only the rows that are needed.
"""

from __future__ import annotations

import contextlib
import io
import math
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from parallel.checkpoint.boxes import BoxedTensor
from parallel.checkpoint.checksums import FileDescription
from parallel.checkpoint.files import CheckpointFiles
from parallel.checkpoint.locations import CorruptCheckpoint, Location
from parallel.device import set_current_device
from parallel.torch_internals import PyTorchFileReader, create_file_view, narrow_tensor_by_index

REQUESTS = 16  # concurrent requests to a remote store
COPIES = 2  # concurrent copies from mapped files: one verifies while the other copies
HOST = torch.device("cpu")
FETCH_ALL = 1 << 20  # bytes; smaller boxes are fetched in full

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

    Failed reads are retried, then raised.

    Args:
        files: the marker's `files`; with them `load` verifies every byte that it uses. None: written without checksums.

    Attributes:
        tensors: by name, with prefix.

    Raises:
        CorruptCheckpoint: `.metadata` is missing, corrupted or refers to anything but DCP's classes and this folder's files.
    """

    def __init__(self, checkpoint: Location, files: Mapping[str, FileDescription] | None = None) -> None:
        self._files = CheckpointFiles(checkpoint, files or {})
        self._metadata = self._read_metadata()
        self.tensors = {
            name: self._stored_tensor(name, stored)
            for name, stored in self._metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }
        self._data_starts: dict[StoredBox, int] = {}

    def open(self, names: Iterable[str]) -> None:
        """Open the files of these tensors.

        Raises:
            CorruptCheckpoint: a file, or its table of checksums, is missing or corrupted.
        """
        for file in sorted({box.file for name in names for box in self.tensors[name].boxes}):
            self._files.open(file)

    def map(self, box: StoredBox) -> Tensor:
        """A box of a local checkpoint as a tensor over the memory-mapped file; read-only.

        Raises:
            CorruptCheckpoint: the file is missing or corrupted.
        """
        storage, start = self._files.map(box.file), self._data_start(box)
        with self._corruption_of(box):
            data = storage[start : start + math.prod(box.sizes) * box.dtype.itemsize]
            return torch.empty(0, dtype=box.dtype).set_(data).view(box.sizes)

    def read(self, box: StoredBox, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Elements [offsets, offsets + sizes) of a box, in the box's coordinates; read-only.

        Raises:
            CorruptCheckpoint: the file is missing or corrupted.
        """
        if self._files.local:
            mapped = self.map(box)
            self._files.verify_mapped(box.file, *self._rows(box, offsets, sizes))
            return narrow_tensor_by_index(mapped, offsets, sizes)
        if box.length < FETCH_ALL or 10 * math.prod(sizes) > 9 * math.prod(box.sizes):
            data = self._files.fetch(box.file, box.start, box.start + box.length)
            with self._corruption_of(box):
                stored = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
            return narrow_tensor_by_index(stored, offsets, sizes)
        writable = bytearray(self._files.fetch(box.file, *self._rows(box, offsets, sizes)))
        rows = torch.frombuffer(writable, dtype=box.dtype).view(sizes[0], *box.sizes[1:])
        return narrow_tensor_by_index(rows, (0, *offsets[1:]), sizes)

    def _rows(self, box: StoredBox, offsets: Sequence[int], sizes: Sequence[int]) -> tuple[int, int]:
        """Start and end in the file of a box's rows that contain the elements."""
        row_bytes = math.prod(box.sizes[1:]) * box.dtype.itemsize
        first, count = (offsets[0], sizes[0]) if box.sizes else (0, 1)
        start = self._data_start(box) + first * row_bytes
        return start, start + count * row_bytes

    def _data_start(self, box: StoredBox) -> int:
        """Offset in its file of a box's first element."""
        if box not in self._data_starts:
            with self._files.stream(box.file, box.start + box.length) as file, self._corruption_of(box):
                archive = PyTorchFileReader(create_file_view(file, box.start, box.length))
                needed = math.prod(box.sizes) * box.dtype.itemsize
                found = archive.get_record_size("data/0")
                if found != needed:
                    raise RuntimeError(f"{found} bytes of elements, {needed} expected")
                self._data_starts[box] = box.start + archive.get_record_offset("data/0")
        return self._data_starts[box]

    def load(self, targets: Mapping[str, BoxedTensor]) -> None:
        """Fill the boxes of `targets`, named as in the checkpoint, from the stored boxes that overlap them.

        Raises:
            CorruptCheckpoint: a file is missing or corrupted.
        """
        reads: list[tuple[StoredBox, Any, Tensor]] = []
        for name, target in targets.items():
            stored: Any = self._metadata.state_dict_metadata[name]  # of a tensor
            items: Iterable[Any] = create_read_items_for_chunk_list(
                name, stored, target.__create_chunk_list__()
            )
            boxes, views = self.tensors[name].boxes, target.views
            reads += [
                (boxes[item.storage_index.index], item, views[item.dest_index.offset]) for item in items
            ]

        def copy(read: tuple[StoredBox, Any, Tensor]) -> None:
            box, item, view = read
            source = self.read(box, item.storage_offsets, item.lengths)
            narrow_tensor_by_index(view.detach(), item.dest_offsets, item.lengths).copy_(source)

        found = {view.device for _, _, view in reads} - {HOST}
        device = found.pop() if found else HOST  # torch's current device is per thread
        count = COPIES if self._files.local else REQUESTS
        with ThreadPoolExecutor(count, "read", set_current_device, (device,)) as threads:
            list(threads.map(self._files.open, sorted({box.file for box, _, _ in reads})))
            list(threads.map(copy, reads))

    @contextlib.contextmanager
    def _corruption_of(self, box: StoredBox) -> Iterator[None]:
        """Raise torch's errors about contents as CorruptCheckpoint."""
        try:
            yield
        except RuntimeError as error:
            reason = f"corrupted at byte {box.start}: {error}"
            raise CorruptCheckpoint(f"{self._files.root}/{box.file}: {reason}") from error

    def _read_metadata(self) -> Metadata:
        path = f"{self._files.root}/.metadata"
        try:
            metadata = _Unpickler(io.BytesIO(self._files.read_whole(".metadata"))).load()
        except (CorruptCheckpoint, OSError):
            raise
        except Exception as error:  # a corrupted pickle raises nearly anything
            raise CorruptCheckpoint(f"{path}: rejected: {error}") from error
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise CorruptCheckpoint(f"{path}: rejected: it is not a checkpoint's metadata")
        return metadata

    def _stored_tensor(self, name: str, stored: TensorStorageMetadata) -> StoredTensor:
        dtype, boxes = stored.properties.dtype, []
        for chunk in stored.chunks:
            info = self._metadata.storage_data.get(MetadataIndex(name, chunk.offsets))
            if info is None or Path(info.relative_path).name != info.relative_path:
                raise CorruptCheckpoint(
                    f"{self._files.root}/.metadata: no file for {name} at {tuple(chunk.offsets)}"
                )
            position = (info.relative_path, info.offset, info.length)
            boxes.append(StoredBox(tuple(chunk.offsets), tuple(chunk.sizes), dtype, *position))
        return StoredTensor(tuple(stored.size), dtype, tuple(boxes))


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "pathlib._local":  # its name since Python 3.13
            module = "pathlib"
        if (module, name) == ("builtins", "getattr"):  # pickles members of enumerations before Python 3.11.5
            return _enum_member
        if (module, name) not in _ALLOWED:
            raise ValueError(f"{module}.{name} is not allowed in a checkpoint's metadata")
        return super().find_class(module, name)


def _enum_member(enumeration: Any, name: str) -> Any:
    if (
        not (isinstance(enumeration, type) and issubclass(enumeration, Enum))
        or name not in enumeration.__members__
    ):
        raise ValueError("builtins.getattr is not allowed in a checkpoint's metadata")
    return enumeration.__members__[name]
