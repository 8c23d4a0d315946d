"""Boxes of global tensors in the protocol by which torch.distributed.checkpoint (DCP) plans what is not a DTensor."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from parallel.optimizer.buckets import ShardBox

PREFIX = {"master": "weights", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


class Boxes:
    """Some boxes of a global tensor, each in memory of its own or as a view of some."""

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


class SavePlanner(DefaultSavePlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].views[index.offset]


class LoadPlanner(DefaultLoadPlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Boxes], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        # The default one walks through the state dict and copies what it does not know.
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].views[index.offset]


def boxes_of(pieces: Iterable[tuple[ShardBox, dict[str, Tensor]]], states: Iterable[str]) -> dict[str, Boxes]:
    """The state dict for DCP: `<prefix>.<name>` to this rank's boxes of it."""
    made: dict[str, Boxes] = {}
    for piece, views in pieces:
        for state in states:
            key = f"{PREFIX[state]}.{piece.name}"
            if key not in made:
                made[key] = Boxes(key, piece.shape)
            made[key].add(piece.offsets, views[state], piece.saved)
    return made
