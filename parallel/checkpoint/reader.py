"""Read tensors from a checkpoint folder: for loading, conversion and comparison.

The folder is torch.distributed.checkpoint's (DCP's): `*.distcp` files of boxes end to end, each one torch.save of a contiguous
tensor, and `.metadata`, a pickle that maps (tensor name, offsets) to (file, offset, length). Only DCP's classes are unpickled.

Local files are mapped into memory: reading a slice costs the slice. From a remote store all of a box is
fetched, or only the rows needed if these are less than a quarter.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.utils import _create_file_view

from parallel.checkpoint.boxes import BoxedTensor
from parallel.checkpoint.checksums import (
    BLOCK,
    SUFFIX,
    BlockTable,
    FileDescription,
    checksum_table,
    describe,
)
from parallel.checkpoint.locations import (
    ABSENT,
    MARKER,
    CorruptCheckpoint,
    Location,
    filesystem,
    is_local,
    retry_reads,
    sizes,
)

REQUESTS = 16  # concurrent requests to a remote store
COPIES = 2  # concurrent copies from mapped files: one verifies while the other copies
FETCH_ALL = 1 << 20  # bytes; of a smaller box all is fetched
T = TypeVar("T")

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
        self._checkpoint, self._described = checkpoint, files or {}
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
        self._tables: dict[str, BlockTable] = {}  # by file

    def map(self, box: StoredBox) -> Tensor:
        """A box of a local checkpoint as a tensor over the memory-mapped file; read-only.

        Raises:
            CorruptCheckpoint: the file is missing or corrupted.
        """
        storage, start = self._map_file(box.file), self._data_start(box)
        with self._corruption_of(box):
            data = storage[start : start + math.prod(box.sizes) * box.dtype.itemsize]
            return torch.empty(0, dtype=box.dtype).set_(data).view(box.sizes)

    def read(self, box: StoredBox, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Elements [offsets, offsets + sizes) of a box, in the box's coordinates; read-only.

        Raises:
            CorruptCheckpoint: the file is missing or corrupted.
        """
        if self._local:
            mapped = self.map(box)
            self._verify_mapped(box.file, *self._rows(box, offsets, sizes))
            return narrow_tensor_by_index(mapped, offsets, sizes)
        if box.length < FETCH_ALL or 4 * math.prod(sizes) > math.prod(box.sizes):
            data = self._fetch(box.file, box.start, box.start + box.length)
            with self._corruption_of(box):
                stored = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
            return narrow_tensor_by_index(stored, offsets, sizes)
        data = bytearray(self._fetch(box.file, *self._rows(box, offsets, sizes)))
        rows = torch.frombuffer(data, dtype=box.dtype).view(sizes[0], *box.sizes[1:])
        return narrow_tensor_by_index(rows, (0, *offsets[1:]), sizes)

    def _rows(self, box: StoredBox, offsets: Sequence[int], sizes: Sequence[int]) -> tuple[int, int]:
        """Start and end in the file of the rows of a box with those elements."""
        row_bytes = math.prod(box.sizes[1:]) * box.dtype.itemsize
        first, count = (offsets[0], sizes[0]) if box.sizes else (0, 1)
        start = self._data_start(box) + first * row_bytes
        return start, start + count * row_bytes

    def _data_start(self, box: StoredBox) -> int:
        """Offset in its file of a box's first element."""
        if box not in self._data_starts:
            end = box.start + box.length
            file = _BlockFile(lambda start, end: self._fetch(box.file, start, end), end)
            with self._corruption_of(box):
                archive = torch._C.PyTorchFileReader(_create_file_view(file, box.start, box.length))
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

        with ThreadPoolExecutor(COPIES if self._local else REQUESTS) as threads:
            list(threads.map(self._open, sorted({box.file for box, _, _ in reads})))
            list(threads.map(copy, reads))

    def _open(self, file: str) -> None:
        """Map a local file, and read the checksums of its blocks if there are any."""
        if self._local:
            self._map_file(file)
        if described := self._described.get(file):
            table = self._read_whole(file + SUFFIX)
            if describe(int(described["size"]), table) != described:
                reason = f"corrupted: its checksum differs from {MARKER}'s"
                raise CorruptCheckpoint(f"{self._root}/{file}{SUFFIX}: {reason}")
            self._tables[file] = BlockTable(int(described["size"]), table)

    def _map_file(self, file: str) -> torch.UntypedStorage:
        if file not in self._mapped:
            path = Path(f"{self._root}/{file}")

            def map_file() -> torch.UntypedStorage:
                with path.open("rb") as opened:  # an error of torch's mapping does not tell why
                    size = os.fstat(opened.fileno()).st_size
                return torch.UntypedStorage.from_file(str(path), False, size)

            mapped = self._read(file, 0, map_file)
            expected = self._described.get(file, {}).get("size", mapped.nbytes())
            if mapped.nbytes() != expected:
                reason = f"{mapped.nbytes():,} bytes instead of {expected:,}"
                raise CorruptCheckpoint(f"{path}: corrupted: {reason}")
            self._mapped[file] = mapped
        return self._mapped[file]

    def _fetch(self, file: str, start: int, end: int) -> bytes | memoryview:
        """Bytes [start, end) of a file, verified if it has checksums."""
        if self._local:
            self._verify_mapped(file, start, end)
            return _bytes(self._map_file(file)[start:end])
        path, table = f"{self._root}/{file}", self._tables.get(file)
        if table is None:
            return self._read(file, end, lambda: self._files.cat_file(path, start=start, end=end))
        blocks = table.blocks(start, end)
        first, last = blocks.start * BLOCK, min(blocks.stop * BLOCK, table.size)
        data = self._read(file, last, lambda: self._files.cat_file(path, start=first, end=last))
        self._verify(file, table, blocks.start, data)
        return memoryview(data)[start - first : end - first]

    def _verify_mapped(self, file: str, start: int, end: int) -> None:
        """Verify the blocks of a mapped file with bytes [start, end) that were not yet, if it has checksums."""
        storage, table = self._map_file(file), self._tables.get(file)
        if table and (blocks := table.unverified(table.blocks(start, end))):
            data = storage[blocks.start * BLOCK : min(blocks.stop * BLOCK, table.size)]
            self._verify(file, table, blocks.start, _bytes(data))

    def _verify(self, file: str, table: BlockTable, first: int, data: bytes | memoryview) -> None:
        wrong = table.corrupted(first, data)
        if wrong is not None:
            reason = f"the {BLOCK >> 10} KiB from byte {wrong * BLOCK:,} differ from their checksum"
            raise CorruptCheckpoint(f"{self._root}/{file}: corrupted: {reason}")

    def _read_whole(self, file: str) -> bytes:
        return self._read(file, 0, lambda: self._files.cat_file(f"{self._root}/{file}"))

    def _read(self, file: str, end: int, read: Callable[[], T]) -> T:
        """Call `read`, with retries. Raises CorruptCheckpoint if the file is missing by a listing, or ends before `end`."""
        path = f"{self._root}/{file}"

        def read_or_explain() -> T:
            try:
                return read()
            except Exception as error:  # of any storage
                listed = self._listed_size(file, error)
                if listed is None:
                    raise CorruptCheckpoint(f"{path}: missing") from error
                if listed < end:
                    reason = f"{listed:,} bytes instead of at least {end:,}"
                    raise CorruptCheckpoint(f"{path}: truncated: {reason}") from error
                raise OSError(f"{path}: {error!r}") from error

        return retry_reads(path, read_or_explain)

    def _listed_size(self, file: str, error: Exception) -> int | None:
        """Size in bytes of a file by a listing, None if that lacks it. Raises `error`, as an OSError, if there is no listing."""
        try:
            return sizes(self._checkpoint).get(file)
        except ABSENT:
            return None
        except Exception:
            raise OSError(f"{self._root}/{file}: {error!r}") from error

    @contextlib.contextmanager
    def _corruption_of(self, box: StoredBox) -> Iterator[None]:
        """Raise torch's errors about contents as CorruptCheckpoint."""
        try:
            yield
        except RuntimeError as error:
            reason = f"corrupted at byte {box.start}: {error}"
            raise CorruptCheckpoint(f"{self._root}/{box.file}: {reason}") from error

    def _read_metadata(self) -> Metadata:
        path = f"{self._root}/.metadata"
        data = self._read_whole(".metadata")
        described = self._described.get(".metadata")
        if described and describe(len(data), checksum_table(data)) != described:
            raise CorruptCheckpoint(f"{path}: corrupted: its checksum differs from {MARKER}'s")
        try:
            metadata = _Unpickler(io.BytesIO(data)).load()
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
                    f"{self._root}/.metadata: no file for {name} at {tuple(chunk.offsets)}"
                )
            position = (info.relative_path, info.offset, info.length)
            boxes.append(StoredBox(tuple(chunk.offsets), tuple(chunk.sizes), dtype, *position))
        return StoredTensor(tuple(stored.size), dtype, tuple(boxes))


class _BlockFile(io.RawIOBase):
    """A seekable file over `fetch(start, end)` of entire blocks, which are kept.

    Args:
        size: end of what is read of it.
    """

    def __init__(self, fetch: Callable[[int, int], bytes | memoryview], size: int) -> None:
        self._fetch, self._size, self._position = fetch, size, 0
        self._blocks: dict[int, bytes | memoryview] = {}

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = (
            offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        )
        return self._position

    def readinto(self, buffer: Any) -> int:
        filled = 0
        while filled < len(buffer) and self._position < self._size:
            block, skipped = divmod(self._position, BLOCK)
            if block not in self._blocks:
                self._blocks[block] = self._fetch(block * BLOCK, min((block + 1) * BLOCK, self._size))
            data = self._blocks[block][skipped : skipped + len(buffer) - filled]
            if not data:
                break
            buffer[filled : filled + len(data)] = data
            filled += len(data)
            self._position += len(data)
        return filled


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "pathlib._local":  # its name since Python 3.13
            module = "pathlib"
        if (module, name) not in _ALLOWED:
            raise ValueError(f"{module}.{name} is not allowed in a checkpoint's metadata")
        return super().find_class(module, name)


def _bytes(storage: torch.UntypedStorage) -> memoryview:
    """A storage's memory."""
    return memoryview(torch.empty(0, dtype=torch.uint8).set_(storage).numpy())
