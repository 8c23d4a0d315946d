"""Where checkpoints lie: a folder, or a prefix that fsspec reaches (`s3://`), alike.

    <place>/step_<n>/*.distcp         each rank's boxes, one file a rank
    <place>/step_<n>/.metadata        DCP's index: which box of which tensor lies at which bytes of which file
    <place>/step_<n>/complete.json    the marker, written last: says what is not a tensor

A checkpoint without its marker is never loaded and may be removed at any time. Files bear a name of the save that wrote
them, so that a writer that was given up and is still writing spoils nothing of its successor's.

This is the one module of `parallel` that knows more than torch: fsspec, which torch requires itself, imported when needed.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.filesystem import _StoragePrefix
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan
from torch.distributed.checkpoint.utils import _create_file_view
from torch.futures import Future

from parallel.checkpoint import container

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

MARKER = "complete.json"
Location = Path | str


def join(place: Location, name: str) -> Location:
    """What is called `name` in a folder or below a prefix."""
    return place / name if isinstance(place, Path) else f"{place.rstrip('/')}/{name}"


def name_of(place: Location) -> str:
    """The last part of a path or URI."""
    return str(place).rstrip("/").rpartition("/")[2]


def complete_checkpoints(place: Location) -> Iterator[tuple[int, Location]]:
    """(step, checkpoint) of the complete checkpoints step_<n> at a place, oldest first."""
    for step, marked in sorted(_steps(place).items()):
        if marked:
            yield step, join(place, f"step_{step}")


def read_marker(checkpoint: Location) -> dict[str, Any]:
    """What a complete checkpoint says of itself.

    Raises:
        ValueError: there is no marker: nothing there, or saving did not finish.
    """
    files, root = _files(checkpoint)
    try:
        return json.loads(files.cat_file(f"{root}/{MARKER}"))
    except FileNotFoundError:
        raise ValueError(f"{checkpoint} is no complete checkpoint: {MARKER} is missing") from None


def write_marker(checkpoint: Location, about: dict[str, Any]) -> None:
    """Complete a checkpoint; readers see no marker or a whole one."""
    files, root = _files(checkpoint)
    data = json.dumps(about, indent=1).encode()
    if _is_folder(files):
        files.pipe_file(f"{root}/.{MARKER}", data)
        files.mv(f"{root}/.{MARKER}", f"{root}/{MARKER}")
    else:
        files.pipe_file(f"{root}/{MARKER}", data)


def discard(checkpoint: Location) -> None:
    """Remove a checkpoint, if it is there: its marker first, so that half of it never counts."""
    files, root = _files(checkpoint)
    for path, recursive in ((f"{root}/{MARKER}", False), (root, True)):
        if files.exists(path):
            files.rm(path, recursive=recursive)


def discard_incomplete(place: Location) -> list[str]:
    """Remove the checkpoints without marker; their names."""
    names = [f"step_{step}" for step, marked in sorted(_steps(place).items()) if not marked]
    for name in names:
        discard(join(place, name))
    return names


def move_aside(place: Location, steps: list[int]) -> Location:
    """Move these checkpoints to the first of `<place>~1`, `<place>~2`, ... that is free; returns that place."""
    files, root = _files(place)
    number = 1
    while files.exists(f"{root}~{number}"):
        number += 1
    aside = f"{str(place).rstrip('/')}~{number}"
    files.makedirs(f"{root}~{number}", exist_ok=True)
    for step in steps:
        source, target = f"{root}/step_{step}", f"{root}~{number}/step_{step}"
        if _is_folder(files):
            files.mv(source, target)
        else:
            found = sorted(files.find(source), key=lambda path: path.endswith(MARKER))  # the marker last
            for path in found:
                files.copy(path, target + path.removeprefix(source))
            files.rm(found)
    return Path(aside) if isinstance(place, Path) else aside


class Writer(FsspecWriter):
    """DCP's writer; a file's name begins with the save's."""

    def __init__(self, checkpoint: Location, save: str) -> None:
        super().__init__(str(checkpoint))
        self.sync_files = _is_folder(self.fs.fs)  # a put of an object is durable by itself
        self.save = save

    def begin(self, rank: int) -> None:
        """Called on each rank before `write_data`."""
        self.fs.mkdir(self.path)
        self.prefix = _StoragePrefix(f"{self.save}_{rank}_")

    def write_data(self, plan: SavePlan, planner: Any) -> Any:
        return super().write_data(dataclasses.replace(plan, storage_data=self.prefix), planner)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()  # DCP's own would name the folder, and checkpoints are moved


class Reader(FsspecReader):
    """DCP's reader, which unpickles DCP's own classes alone and reads what is asked for rather than the items it lies in.

    Items in a folder are mapped into memory. Of a remote one either all is fetched or, where that is several times more, the
    rows that are asked for; several items at a time.
    """

    AT_ONCE = 16  # requests
    MANY = 1 << 20  # bytes of an item below which it is fetched whole

    def __init__(self, checkpoint: Location) -> None:
        super().__init__(str(checkpoint), use_listings_cache=False)

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """DCP's index. Raises ValueError where there is none, or where it holds what no index does."""
        try:
            data = self.fs.fs.cat_file(f"{self.path}/.metadata")
        except FileNotFoundError:
            raise ValueError(f"{self.path} is no checkpoint: .metadata is missing") from None
        metadata = container.parse_metadata(data, self.path)
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any, **named: Any) -> None:
        super().set_up_storage_reader(metadata, is_coordinator, **named)
        self._forms = {
            (key, chunk.offsets): (stored.properties.dtype, tuple(chunk.sizes))
            for key, stored in metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
            for chunk in stored.chunks
        }
        self._mapped: dict[str, torch.UntypedStorage] = {}

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Raises ValueError where a file is missing or damaged."""

        def fill(item: ReadItem) -> None:
            info = self.storage_data[item.storage_index]
            target = planner.resolve_tensor(item).detach()
            try:
                target.copy_(self._part(item, info))
            except (FileNotFoundError, RuntimeError) as error:
                where = f"{self.path}/{info.relative_path}"
                raise ValueError(f"{where} is missing or damaged at byte {info.offset}: {error}") from error
            planner.commit_tensor(item, target)

        if _is_folder(self.fs.fs):
            for item in plan.items:
                fill(item)
        else:
            with ThreadPoolExecutor(self.AT_ONCE) as threads:
                list(threads.map(fill, plan.items))
        self._mapped.clear()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _part(self, item: ReadItem, info: Any) -> Tensor:
        """What is asked for of a stored item."""
        path = f"{self.path}/{info.relative_path}"
        dtype, sizes = self._forms[item.storage_index.fqn, item.storage_index.offset]
        offsets = tuple(item.storage_offsets)
        width = math.prod(sizes[1:]) * dtype.itemsize
        if _is_folder(self.fs.fs):
            with self.fs.fs.open(path, "rb") as file:
                start = _data_offset(file, info)
            raw = self._map(path)[start : start + sizes[0] * width]
            stored = torch.empty(0, dtype=dtype).set_(raw).view(sizes)
        elif info.length < self.MANY or 4 * math.prod(item.lengths) > math.prod(sizes):
            data = self.fs.fs.cat_file(path, start=info.offset, end=info.offset + info.length)
            stored = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        else:  # whole rows
            with self.fs.fs.open(path, "rb", cache_type="none") as file:
                start = _data_offset(file, info) + offsets[0] * width
            data = bytearray(self.fs.fs.cat_file(path, start=start, end=start + item.lengths[0] * width))
            stored = torch.frombuffer(data, dtype=dtype).view(item.lengths[0], *sizes[1:])
            offsets = (0, *offsets[1:])
        return narrow_tensor_by_index(stored, offsets, item.lengths)

    def _map(self, path: str) -> torch.UntypedStorage:
        if path not in self._mapped:
            size = self.fs.fs.size(path)
            self._mapped[path] = torch.UntypedStorage.from_file(_files(path)[1], False, size)
        return self._mapped[path]


def _data_offset(file: IO[bytes], info: Any) -> int:
    """Where an item's elements begin in its file; it is one torch.save of a contiguous tensor."""
    item = torch._C.PyTorchFileReader(_create_file_view(file, info.offset, info.length))
    return info.offset + item.get_record_offset("data/0")


def _files(place: Location) -> tuple[AbstractFileSystem, str]:
    from fsspec.core import url_to_fs

    # Other processes' writes are to be seen, so listings are not cached.
    files, root = url_to_fs(str(place), use_listings_cache=False)
    return files, root.rstrip("/")


def _is_folder(files: AbstractFileSystem) -> bool:
    return "file" in files.protocol


def _steps(place: Location) -> dict[int, bool]:
    """Of the checkpoints at a place, complete or not: whether the marker is there."""
    files, root = _files(place)
    try:
        names = [path.rstrip("/").rpartition("/")[2] for path in files.ls(root, detail=False)]
    except FileNotFoundError:
        return {}
    steps = [name.removeprefix("step_") for name in names if name.startswith("step_")]
    return {int(step): files.exists(f"{root}/step_{step}/{MARKER}") for step in steps if step.isdecimal()}
