"""LoRA adapters in a checkpoint of Trainshed.

A LoRA run's checkpoint contains only the factors A and B; its marker has the profile with rank, alpha and targets.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from modeling.conversion.adapters.adapters import Adapters, Factors
from modeling.models.build import DTYPES
from modeling.models.lora_targets import Layer, layers_of
from parallel.checkpoint import boxes, locations
from parallel.checkpoint.reader import Reader
from parallel.layout import global_name
from profiles import renamed_keys
from profiles.schema import Profile

PREFIX = boxes.PREFIX["master"]


class TrainedAdapters(Adapters):
    """The adapters of a complete checkpoint. Raises ValueError if it has none, or is corrupted."""

    def __init__(self, folder: Path) -> None:
        marker = locations.read_marker(folder)
        profile = Profile.model_validate(renamed_keys.current(marker["profile"]))
        if not profile.lora.rank:
            raise ValueError(f"{folder}: not a checkpoint of LoRA adapters")
        self.model, self._lora, self.base = profile.model, profile.lora, profile.init.from_
        self.rank, self.dropout = profile.lora.rank, profile.lora.dropout
        self.dtype = DTYPES[profile.train.precision]
        self._reader = Reader(folder, marker.get("files"))

    def __iter__(self) -> Iterator[Factors]:
        rank, targets, model = self.rank, self._lora.targets, self.model
        for number in range(model.num_hidden_layers):
            for layer in layers_of(model, number):
                groups, prefix = layer.groups(targets), f"layers.{number}.{layer.path}"
                if layer.experts and groups:
                    yield from self._of_experts(layer, prefix)
                    continue
                whole = len(groups) == 1 and len(groups[0]) == len(layer.outputs)
                for index, group in enumerate(groups):
                    a = self._read(f"{prefix}.lora.a", "" if whole else "_".join(group))
                    for section in group:
                        b = self._read(f"{prefix}.lora.b", section)[:, index * rank : (index + 1) * rank]
                        yield Factors(global_name(f"{prefix}.weight", section), a, b, self._lora.alpha / rank)

    def _of_experts(self, layer: Layer, prefix: str) -> Iterator[Factors]:
        for expert in range(layer.experts or 0):
            a = self._read(f"{prefix}.lora.a", str(expert))
            for section in layer.outputs:
                name = f"{expert}.{section}" if section else str(expert)
                b = self._read(f"{prefix}.lora.b", name)
                yield Factors(global_name(f"{prefix}.weight", name), a, b, self._lora.alpha / self.rank)

    def _read(self, prefix: str, section: str) -> Tensor:
        name = global_name(f"{PREFIX}.{prefix}.weight", section)
        if name not in self._reader.tensors:
            raise ValueError(f"the checkpoint lacks {name}")
        stored = self._reader.tensors[name]
        tensor = torch.empty(stored.shape)
        for box in stored.boxes:
            index = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
            tensor[index] = self._reader.read(box, [0] * len(box.sizes), box.sizes)
        return tensor
