"""Boxes of global tensors in torch.distributed.checkpoint's (DCP) protocol for custom tensor types.

A box is a hyperrectangle of a global tensor, given by its offsets and sizes in global coordinates.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from parallel.optimizer.buckets import ShardBox

PREFIX = {"master": "weights"}  # of names in checkpoints, by state; others are stored under the state's name


class BoxedTensor:
    """This rank's boxes of one global tensor, each with the memory that is saved or loaded.

    Args:
        name: in the checkpoint, with its prefix.
        shape: of the global tensor.
    """

    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        self.name, self.shape = name, torch.Size(shape)
        self.views: dict[torch.Size, Tensor] = {}  # by offsets
        self._saved: list[torch.Size] = []

    def add(self, offsets: tuple[int, ...], view: Tensor, saved: bool = True) -> None:
        """Add the box at `offsets`; `saved`: whether this rank writes it."""
        self.views[torch.Size(offsets)] = view
        if saved:
            self._saved.append(torch.Size(offsets))

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=offsets, sizes=self.views[offsets].size()),
                    properties=TensorProperties.create_from_tensor(self.views[offsets]),
                    size=self.shape,
                ),
            )
            for offsets in self._saved
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets=o, sizes=view.size()) for o, view in self.views.items()]


class SavePlanner(DefaultSavePlanner):
    """DCP's save planner over a state dict of `BoxedTensor`."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].views[index.offset]


def boxed_tensors(
    boxes: Iterable[tuple[ShardBox, dict[str, Tensor]]], states: Collection[str] | None = None
) -> dict[str, BoxedTensor]:
    """The optimizer's state dict for DCP, by checkpoint name.

    Args:
        boxes: of this rank, each with the views of its optimizer states.
        states: those to include; None: all.
    """
    tensors: dict[str, BoxedTensor] = {}
    for box, views in boxes:
        for state in views.keys() if states is None else states:
            name = f"{PREFIX.get(state, state)}.{box.name}"
            if name not in tensors:
                tensors[name] = BoxedTensor(name, box.shape)
            tensors[name].add(box.offsets, views[state], box.saved)
    return tensors
