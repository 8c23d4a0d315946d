"""The container of checkpoints, torch.distributed.checkpoint's (DCP's) folder, item by item: read in place, written in order.

A folder holds `*.distcp` files of items one after another, each one torch.save of a box of a global tensor, and `.metadata`,
a pickle that says what lies where, from which what DCP puts there is taken and all else refused. `views` maps items
into memory: nothing is read until a slice is. `write_file` and `write_metadata` make a container from one process with as many
files as wanted, so that what a rank will need can lie in one file, in its order.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _create_file_view
from torch.serialization import skip_data

# All that a `.metadata` of tensors is made of.
_KNOWN = {
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


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "pathlib._local":  # as Python 3.13 has it
            module = "pathlib"
        if (module, name) not in _KNOWN:
            raise ValueError(f"{module}.{name} does not belong into a checkpoint's metadata")
        return super().find_class(module, name)


def read_metadata(folder: Path) -> Metadata:
    """The container's table of contents, unpickled from DCP's own classes alone.

    Raises:
        ValueError: it is missing or damaged, or holds anything else.
    """
    try:
        return parse_metadata((folder / ".metadata").read_bytes(), str(folder))
    except FileNotFoundError:
        raise ValueError(f"{folder} is no checkpoint: .metadata is missing") from None


def parse_metadata(data: bytes, folder: str) -> Metadata:
    """The same of the file's contents; `folder` is for messages."""
    try:
        metadata = _Unpickler(io.BytesIO(data)).load()
    except Exception as error:  # a damaged pickle raises nearly anything
        raise ValueError(f"{folder}/.metadata is refused: {error}") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise ValueError(f"{folder}/.metadata is refused: it is no metadata of a checkpoint")
    return metadata


@dataclass(frozen=True)
class View:
    """One item: the box of a global tensor that it is, and how to map it into memory."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    open: Callable[[], Tensor]


def views(folder: Path, prefix: str) -> dict[str, tuple[torch.dtype, tuple[int, ...], list[View]]]:
    """Type, global shape and items of every global tensor that is stored as `<prefix>.<name>`.

    Raises:
        ValueError: the metadata is refused; an item that is not there.
    """
    metadata = read_metadata(folder)
    found = {}
    for key, stored in metadata.state_dict_metadata.items():
        if not key.startswith(f"{prefix}.") or not isinstance(stored, TensorStorageMetadata):
            continue
        items = []
        for chunk in stored.chunks:
            info = metadata.storage_data.get(MetadataIndex(key, chunk.offsets))
            if info is None or Path(info.relative_path).name != info.relative_path:
                raise ValueError(f"{folder}: no file holds {key} at {tuple(chunk.offsets)}")
            path = folder / info.relative_path
            items.append(
                View(
                    tuple(chunk.offsets),
                    tuple(chunk.sizes),
                    partial(_open, path=path, info=info, sizes=tuple(chunk.sizes)),
                )
            )
        found[key.removeprefix(f"{prefix}.")] = (stored.properties.dtype, tuple(stored.size), items)
    return found


def _open(path: Path, info: _StorageInfo, sizes: tuple[int, ...]) -> Tensor:
    """An item in its file, mapped."""
    try:
        now = stamp(path)
        form = _form(path, now, info.offset, info.length)
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    except (OSError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} is damaged at byte {info.offset}: {error}") from error
    if form.shape != sizes:
        raise ValueError(f"{path}: the item at byte {info.offset} is not of shape {sizes}")
    whole = _mapped(path, now)
    if form.stop > whole.nbytes():
        raise ValueError(f"{path} ends within the item at byte {info.offset}")
    flat = torch.empty(0, dtype=form.dtype).set_(whole[form.start : form.stop])
    return flat.as_strided(form.shape, form.stride, form.first)


@dataclass(frozen=True)
class _Form:
    """A tensor in a file: its memory is the bytes [start, stop), in which it begins at element `first`."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    first: int
    dtype: torch.dtype
    start: int
    stop: int


@lru_cache(maxsize=100_000)
def _form(path: Path, _: tuple[int, int, int], offset: int, length: int) -> _Form:
    # In this mode torch.load gives a tensor's form and the place of its bytes, and reads none of them.
    with path.open("rb") as file, FakeTensorMode():
        item = torch.load(_create_file_view(file, offset, length), weights_only=True)
        memory = item.untyped_storage()
        start = offset + memory._checkpoint_offset
        return _Form(
            tuple(item.shape),
            item.stride(),
            item.storage_offset(),
            item.dtype,
            start,
            start + memory.nbytes(),
        )


def stamp(path: Path) -> tuple[int, int, int]:
    """What changes when a file does: its number, size and time."""
    stat = path.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


@lru_cache(maxsize=256)
def _mapped(path: Path, stamp: tuple[int, int, int]) -> torch.UntypedStorage:
    return torch.UntypedStorage.from_file(str(path), False, stamp[1])


@dataclass(frozen=True)
class Item:
    """A box of a global tensor to be written.

    Attributes:
        name: of the global tensor, with its prefix.
        shape: of the global tensor.
        offsets, sizes: the box.
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Written:
    """Where an item lies; JSON values all."""

    item: Item
    dtype: str
    file: str
    offset: int
    length: int


def write_file(
    path: Path, items: Iterable[tuple[Item, Tensor]], told: Callable[[memoryview], None] = lambda data: None
) -> list[Written]:
    """Write one file of items in their order; tensors are taken one at a time, and written from where they lie.

    Args:
        told: called with all bytes as they are written, in order.
    """
    written = []
    with path.open("wb", buffering=0) as file:
        for item, tensor in items:
            assert tuple(tensor.shape) == item.sizes
            offset = file.tell()
            before, after = _envelope(item.sizes, tensor.dtype)
            for data in (memoryview(before), bytes_of(tensor), memoryview(after)):
                told(data)
                while data:
                    data = data[file.write(data) :]
            dtype = str(tensor.dtype).removeprefix("torch.")
            written.append(Written(item, dtype, path.name, offset, file.tell() - offset))
    return written


@lru_cache(maxsize=256)
def _envelope(sizes: tuple[int, ...], dtype: torch.dtype) -> tuple[bytes, bytes]:
    """What torch.save puts before and after the bytes of a contiguous tensor.

    The checksum in it is of zeros; torch.load has never looked at it.
    """
    with FakeTensorMode():
        form = torch.empty(sizes, dtype=dtype)
    buffer = io.BytesIO()
    with skip_data(materialize_fake_tensors=True):
        torch.save(form, buffer)
    buffer.seek(0)
    with FakeTensorMode():
        memory = torch.load(buffer, weights_only=True).untyped_storage()
    content = buffer.getbuffer()
    start = memory._checkpoint_offset
    return bytes(content[:start]), bytes(content[start + memory.nbytes() :])


def bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's elements in their order, without a copy where it is contiguous."""
    return memoryview(tensor.contiguous().view(torch.uint8).numpy()).cast("B")


def write_metadata(folder: Path, written: Iterable[Written]) -> None:
    """Write `.metadata` for the files that are there."""
    state: dict[str, TensorStorageMetadata] = {}
    results = []
    for each in written:
        item = each.item
        properties = TensorProperties(dtype=getattr(torch, each.dtype))
        known = state.setdefault(item.name, TensorStorageMetadata(properties, torch.Size(item.shape), []))
        known.chunks.append(ChunkStorageMetadata(torch.Size(item.offsets), torch.Size(item.sizes)))
        info = _StorageInfo(each.file, each.offset, each.length)
        results.append(WriteResult(MetadataIndex(item.name, item.offsets), each.length, info))
    writer = dcp.FileSystemWriter(folder)
    writer.set_up_storage_writer(True)
    writer.finish(Metadata(state), [results])
