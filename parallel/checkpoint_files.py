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
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar

import torch
from torch.distributed.checkpoint import filesystem as dcp_files
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

MARKER = "complete.json"
Place = Path | str


def join(place: Place, name: str) -> Place:
    """What is called `name` in a folder or below a prefix."""
    return place / name if isinstance(place, Path) else f"{place.rstrip('/')}/{name}"


def name_of(place: Place) -> str:
    """The last part of a path or URI."""
    return str(place).rstrip("/").rpartition("/")[2]


def complete(place: Place) -> Iterator[tuple[int, Place]]:
    """(step, checkpoint) of the complete checkpoints step_<n> at a place, oldest first."""
    for step, marked in sorted(_steps(place).items()):
        if marked:
            yield step, join(place, f"step_{step}")


def read_marker(checkpoint: Place) -> dict[str, Any]:
    """What a complete checkpoint says of itself.

    Raises:
        ValueError: there is no marker: nothing there, or saving did not finish.
    """
    files, root = _files(checkpoint)
    try:
        return json.loads(files.cat_file(f"{root}/{MARKER}"))
    except FileNotFoundError:
        raise ValueError(f"{checkpoint} is no complete checkpoint: {MARKER} is missing") from None


def write_marker(checkpoint: Place, about: dict[str, Any]) -> None:
    """Complete a checkpoint; readers see no marker or a whole one."""
    files, root = _files(checkpoint)
    data = json.dumps(about, indent=1).encode()
    if _is_folder(files):
        files.pipe_file(f"{root}/.{MARKER}", data)
        files.mv(f"{root}/.{MARKER}", f"{root}/{MARKER}")
    else:
        files.pipe_file(f"{root}/{MARKER}", data)


def discard(checkpoint: Place) -> None:
    """Remove a checkpoint, if it is there: its marker first, so that half of it never counts."""
    files, root = _files(checkpoint)
    for path, recursive in ((f"{root}/{MARKER}", False), (root, True)):
        if files.exists(path):
            files.rm(path, recursive=recursive)


def discard_partial(place: Place) -> list[str]:
    """Remove the checkpoints without marker; their names."""
    names = [f"step_{step}" for step, marked in sorted(_steps(place).items()) if not marked]
    for name in names:
        discard(join(place, name))
    return names


def move_aside(place: Place, steps: list[int]) -> Place:
    """Move these checkpoints to the first of `<place>~1`, `<place>~2`, ... that is free; returns that place."""
    files, root = _files(place)
    number = 1
    while files.exists(f"{root}~{number}"):
        number += 1
    aside = f"{str(place).rstrip('/')}~{number}"
    files.makedirs(f"{root}~{number}", exist_ok=True)
    for step in steps:
        files.mv(f"{root}/step_{step}", f"{root}~{number}/step_{step}", recursive=True)
    return Path(aside) if isinstance(place, Path) else aside


class Writer(FsspecWriter):
    """DCP's writer; a file's name begins with the save's."""

    def __init__(self, checkpoint: Place, save: str) -> None:
        super().__init__(str(checkpoint))
        self.sync_files = _is_folder(self.fs.fs)  # a put of an object is durable by itself
        self.save = save

    def begin(self, rank: int) -> None:
        """Called on each rank before `write_data`."""
        self.fs.mkdir(self.path)
        self.prefix = dcp_files._StoragePrefix(f"{self.save}_{rank}_")

    def write_data(self, plan: SavePlan, planner: Any) -> Any:
        return super().write_data(dataclasses.replace(plan, storage_data=self.prefix), planner)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()  # DCP's own would name the folder, and checkpoints are moved


class Reader(FsspecReader):
    """DCP's reader, which unpickles DCP's own classes alone and reads no bytes beyond the boxes that are asked for."""

    def __init__(self, checkpoint: Place) -> None:
        super().__init__(str(checkpoint), use_listings_cache=False)

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """DCP's index. Raises ValueError where there is none, or where it holds what no index does."""
        try:
            metadata = _Unpickler(io.BytesIO(self.fs.fs.cat_file(f"{self.path}/.metadata"))).load()
        except FileNotFoundError:
            raise ValueError(f"{self.path} is no checkpoint: .metadata is missing") from None
        except pickle.UnpicklingError as error:
            raise ValueError(f"{self.path}/.metadata is damaged or no index of DCP's: {error}") from None
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    def _slice_file(self, file: IO[bytes], info: Any) -> IO[bytes]:
        # One exact request; seeking about in a remote file would fetch whole blocks around it.
        return io.BytesIO(self.fs.fs.cat_file(file.path, info.offset, info.offset + info.length))


class _Unpickler(pickle.Unpickler):
    """Of DCP's index: its classes, and torch's sizes and types."""

    CLASSES: ClassVar = {
        dcp_metadata.__name__: {
            *("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata"),
            *("ChunkStorageMetadata", "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING"),
        },
        dcp_files.__name__: {"_StorageInfo"},
        "torch": {"Size"},
        "torch.serialization": {"_get_layout"},
        "pathlib": {"PosixPath"},
    }

    def find_class(self, module: str, name: str) -> Any:
        known = name in self.CLASSES.get(module, ())
        if known or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _files(place: Place) -> tuple[AbstractFileSystem, str]:
    from fsspec.core import url_to_fs

    # Other processes' writes are to be seen, so listings are not cached.
    files, root = url_to_fs(str(place), use_listings_cache=False)
    return files, root.rstrip("/")


def _is_folder(files: AbstractFileSystem) -> bool:
    return "file" in files.protocol


def _steps(place: Place) -> dict[int, bool]:
    """Of the checkpoints at a place, complete or not: whether the marker is there."""
    files, root = _files(place)
    try:
        names = [path.rstrip("/").rpartition("/")[2] for path in files.ls(root, detail=False)]
    except FileNotFoundError:
        return {}
    steps = [name.removeprefix("step_") for name in names if name.startswith("step_")]
    return {int(step): files.exists(f"{root}/step_{step}/{MARKER}") for step in steps if step.isdecimal()}
