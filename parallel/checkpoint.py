"""Distributed checkpoints: global tensors by name and box, so any topology loads what any other saved.

The container is torch.distributed.checkpoint (DCP). A rank hands in the boxes that its optimizer shard holds, of three global
tensors a parameter, all float32:

    weights.<name>      the master weights (bf16 weights are these, rounded)
    exp_avg.<name>      first moment
    exp_avg_sq.<name>   second moment

Each element is written by one rank and read by those that need it; no rank holds or moves more than its own bytes. A
checkpoint folder is complete when `complete.json` is there, which is written last and carries what is not a tensor.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from parallel.buckets import Piece
from parallel.zero1 import ZeRO1

MARKER = "complete.json"
PREFIX = {"master": "weights", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


class Boxes:
    """Some boxes of a global tensor, in the protocol by which DCP plans what is not a DTensor."""

    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        self.name, self.shape = name, torch.Size(shape)
        self.views: dict[torch.Size, Tensor] = {}  # by offsets
        self.saved: list[torch.Size] = []

    def add(self, offsets: tuple[int, ...], view: Tensor, saved: bool = True) -> None:
        """A box at `offsets`; `saved` says whether this rank writes it."""
        self.views[torch.Size(offsets)] = view
        if saved:
            self.saved.append(torch.Size(offsets))

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        items = []
        for offsets in self.saved:
            view = self.views[offsets]
            items.append(
                WriteItem(
                    index=MetadataIndex(fqn, offsets),
                    type=WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        chunk=ChunkStorageMetadata(offsets=offsets, sizes=view.size()),
                        properties=TensorProperties.create_from_tensor(view),
                        size=self.shape,
                    ),
                )
            )
        return items

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets=o, sizes=view.size()) for o, view in self.views.items()]


class _SavePlanner(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].views[index.offset]


class _LoadPlanner(DefaultLoadPlanner):
    def set_up_planner(
        self, state_dict: dict[str, Boxes], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        # The default one walks through the state dict and copies what it does not know.
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].views[index.offset]


def boxes_of(pieces: Iterable[tuple[Piece, dict[str, Tensor]]], states: Iterable[str]) -> dict[str, Boxes]:
    """The state dict for DCP: `<prefix>.<name>` to this rank's boxes of it."""
    made: dict[str, Boxes] = {}
    for piece, views in pieces:
        for state in states:
            key = f"{PREFIX[state]}.{piece.name}"
            if key not in made:
                made[key] = Boxes(key, piece.shape)
            made[key].add(piece.offsets, views[state], piece.saved)
    return made


class Superseded(RuntimeError):
    """Another writer has taken over the run: this one must leave nothing behind that counts."""


def save(
    folder: Path, optimizer: ZeRO1, about: dict[str, Any], allowed: Callable[[], None] = lambda: None
) -> None:
    """Write a checkpoint; all ranks call it. What was there without a marker is replaced.

    Args:
        folder: of this checkpoint; on a shared file system where there are several nodes.
        about: JSON values to go into the marker: step, samples consumed, the profile.
        allowed: rank 0 calls it right before the marker is written; it raises `Superseded` where it may not be.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    if rank == 0:
        allowed()  # what is there already may be another's
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    _barrier()
    state = boxes_of(optimizer.pieces(), PREFIX)
    dcp.save(
        state,
        storage_writer=dcp.FileSystemWriter(folder),
        planner=_SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        no_dist=not dist.is_initialized(),
    )
    _barrier()
    if rank == 0:
        about = {**about, "optimizer_steps": optimizer.steps, "torch": torch.__version__}
        temporary = folder / f".{MARKER}"
        temporary.write_text(json.dumps(about, indent=1))
        allowed()
        os.replace(temporary, folder / MARKER)
    _barrier()


def load(folder: Path, optimizer: ZeRO1, *, weights_only: bool = False) -> dict[str, Any]:
    """Read a checkpoint, saved at whatever topology, into the optimizer's shards and the parameters; all ranks call it.

    Args:
        weights_only: leave moments and step count as they are (continual pretraining).

    Returns:
        What `save` was told `about` it.

    Raises:
        ValueError: the checkpoint is not complete, or is of a different model; names the first difference.
    """
    about = read_marker(folder)
    reader = dcp.FileSystemReader(folder)
    states = ["master"] if weights_only else list(PREFIX)
    state = boxes_of(optimizer.pieces(), states)
    stored = reader.read_metadata().state_dict_metadata
    for key, boxes in state.items():
        if key not in stored:
            raise ValueError(f"checkpoint {folder.name} has no tensor {key}: it is of a different model")
        if tuple(stored[key].size) != tuple(boxes.shape):
            found, wanted = tuple(stored[key].size), tuple(boxes.shape)
            raise ValueError(f"checkpoint {folder.name}: {key} has shape {found}, the model needs {wanted}")
    dcp.load(
        state,
        storage_reader=reader,
        planner=_LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        no_dist=not dist.is_initialized(),
    )
    optimizer.publish()
    if not weights_only:
        optimizer.steps = about["optimizer_steps"]
    return about


def read_marker(folder: Path) -> dict[str, Any]:
    """What a complete checkpoint says of itself.

    Raises:
        ValueError: there is no marker: nothing there, or saving did not finish.
    """
    try:
        return json.loads((folder / MARKER).read_text())
    except FileNotFoundError:
        raise ValueError(f"{folder} is no complete checkpoint: {MARKER} is missing") from None


def complete(folder: Path) -> Iterator[tuple[int, Path]]:
    """(step, folder) of the complete checkpoints step_<n> in a folder, oldest first."""
    found = [(int(p.name.removeprefix("step_")), p) for p in folder.glob("step_*") if (p / MARKER).is_file()]
    yield from sorted(found)


def read_global(folder: Path, prefix: str = "weights") -> dict[str, Tensor]:
    """Whole global tensors of one kind, on the CPU, in one process."""
    reader = dcp.FileSystemReader(folder)
    stored = reader.read_metadata().state_dict_metadata
    names = [key for key in stored if key.startswith(f"{prefix}.")]
    state = {key: torch.empty(stored[key].size, dtype=stored[key].properties.dtype) for key in names}
    dcp.load(state, storage_reader=reader, no_dist=True)
    return {key.removeprefix(f"{prefix}."): tensor for key, tensor in state.items()}


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
