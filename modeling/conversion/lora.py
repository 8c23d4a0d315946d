"""LoRA adapters of a checkpoint: merged into the weights that they update, or written in PEFT's format.

A checkpoint of a LoRA run holds the factors A and B alone; its marker has the profile with rank, alpha and targets. PEFT reads a
folder with adapter_config.json and adapter_model.safetensors, with one A for each projection: those that share one get a copy.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from modeling.conversion.weights import Part, Weights
from modeling.models.build import DTYPES
from modeling.models.lora import groups_of, layers_of
from modeling.models.weight_names import huggingface_tensor
from parallel.checkpoint import checkpoint
from parallel.checkpoint.reader import Reader
from profiles.schema import Profile

PREFIX = checkpoint.PREFIX["master"]
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@dataclass(frozen=True)
class Factors:
    """The update of one global tensor, scale · B A."""

    tensor: str  # our name of the tensor
    a: Tensor  # (r, i), float32
    b: Tensor  # (o, r), float32
    scale: float

    def of(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        """A box of the update."""
        rows, columns = (slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
        return self.b[rows] @ self.a[:, columns] * self.scale


class Adapters:
    """The adapters of a complete checkpoint. Raises ValueError if it has none, or is corrupted."""

    def __init__(self, folder: Path) -> None:
        about = checkpoint.read_marker(folder)
        self.profile = Profile.model_validate(about["profile"])
        self.lora = self.profile.lora
        if not self.lora.rank:
            raise ValueError(f"{folder}: is not a checkpoint of adapters")
        self._reader = Reader(folder, about.get("files"))

    def __iter__(self) -> Iterator[Factors]:
        rank, targets, model = self.lora.rank, self.lora.targets, self.profile.model
        for number in range(model.num_hidden_layers):
            for layer, (path, sections) in layers_of(model).items():
                groups, prefix = groups_of(layer, targets, model), f"layers.{number}.{path}"
                whole = len(groups) == 1 and len(groups[0]) == len(sections)
                for index, group in enumerate(groups):
                    a = self._read(f"{prefix}.lora.a", "" if whole else "_".join(group))
                    for section in group:
                        b = self._read(f"{prefix}.lora.b", section)[:, index * rank : (index + 1) * rank]
                        yield Factors(_name(prefix, section), a, b, self.lora.alpha / rank)

    def _read(self, prefix: str, section: str) -> Tensor:
        name = f"{PREFIX}.{_name(prefix, section)}"
        if name not in self._reader.tensors:
            raise ValueError(f"the checkpoint lacks {name}")
        stored = self._reader.tensors[name]
        tensor = torch.empty(stored.shape)
        for box in stored.boxes:
            index = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
            tensor[index] = self._reader.read(box, [0] * len(box.sizes), box.sizes)
        return tensor

    def merged(self, weights: Weights) -> Weights:
        """The weights with the updates added, in the run's precision."""
        parts = dict(weights.parts)
        for factors in self:
            parts[factors.tensor] = [
                Part(part.offsets, part.sizes, torch.float32, partial(_add, part, factors))
                for part in parts[factors.tensor]
            ]
        return Weights(weights.model, parts, DTYPES[self.profile.train.precision])

    def write(self, folder: Path) -> None:
        """Write PEFT's folder."""
        from safetensors.torch import save_file

        model = self.profile.model
        stored: dict[
            str, list[Factors]
        ] = {}  # by the module of the Hugging Face model, which may have several weights in one
        for factors in self:
            name = huggingface_tensor(model, factors.tensor).name
            stored.setdefault(name.removesuffix(".weight"), []).append(factors)
        tensors, modules = {}, set()
        for module, parts in stored.items():
            # In GPT-2, the last part of a name alone is that of two modules.
            modules.add(".".join(module.split(".")[-2 if model.architecture == "gpt" else -1 :]))
            tensors[f"base_model.model.{module}.lora_A.weight"] = parts[0].a.clone()
            tensors[f"base_model.model.{module}.lora_B.weight"] = torch.cat([part.b for part in parts])
        configuration = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.profile.init.from_,
            "r": self.lora.rank,
            "lora_alpha": self.lora.alpha,
            "lora_dropout": self.lora.dropout,
            "target_modules": sorted(modules),
            "fan_in_fan_out": model.architecture == "gpt",
            "bias": "none",
            "inference_mode": True,
        }
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        (folder / CONFIG).write_text(json.dumps(configuration, indent=1) + "\n")


def _name(prefix: str, section: str) -> str:
    return ".".join(part for part in (prefix, section, "weight") if part)


def _add(part: Part, factors: Factors) -> Tensor:
    return part.open().float() + factors.of(part.offsets, part.sizes)
