"""LoRA adapters of any format: merged into the weights that they update, or written in PEFT's format.

A LoRA run's checkpoint contains only the factors A and B; its marker has the profile with rank, alpha and targets. PEFT reads a
folder with adapter_config.json and adapter_model.safetensors, which has one A per projection, so a shared A is copied. NxD's
adapters are in its shards (nxd/lora.py).
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modeling.conversion import formats, peft_experts
from modeling.conversion.nxd.layout import NxDLayout
from modeling.conversion.weights import Part, Weights, global_shapes
from modeling.models.build import DTYPES
from modeling.models.families import huggingface_tensor
from modeling.models.lora import Layer, layers_of
from parallel.checkpoint import checkpoint, locations
from parallel.checkpoint.reader import Reader
from profiles.errors import ProfileError
from profiles.schema import Profile
from profiles.sections.model import Model

PREFIX = checkpoint.PREFIX["master"]
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MODULE = "base_model.model."  # prefix of the names of PEFT's tensors


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


class Adapters(ABC):
    """The updates of a model's weights.

    Attributes:
        model: the model that they update.
        rank, dropout: rank and dropout rate of all updates.
        base: source of the weights that they update; None if unknown.
        dtype: dtype of merged weights; None: that of the weights.
    """

    model: Model
    rank: int
    dropout: float = 0.0
    base: str | None = None
    dtype: torch.dtype | None = None

    @abstractmethod
    def __iter__(self) -> Iterator[Factors]:
        """The update of each tensor. Raises ValueError if a factor is missing or corrupted."""

    def merged(self, weights: Weights) -> Weights:
        """The weights with the updates added. Raises ValueError if they belong to another model."""
        parts = dict(weights.parts)
        for factors in self:
            shape = (len(factors.b), factors.a.shape[1])
            if weights.shapes.get(factors.tensor) != shape:
                raise ValueError(
                    f"the adapters update {factors.tensor} of shape {shape}, which the weights do not have"
                )
            parts[factors.tensor] = [
                Part(part.offsets, part.sizes, torch.float32, partial(_add, part, factors))
                for part in parts[factors.tensor]
            ]
        dtype = self.dtype or next(iter(weights.parts.values()))[0].dtype
        return Weights(weights.model, parts, dtype)

    def write(self, folder: Path) -> dict[str, int]:
        """Write PEFT's folder; returns the number and bytes of its tensors.

        Raises:
            ValueError: PEFT has no format for updates of experts of this architecture.
        """
        from safetensors.torch import save_file

        model, scale = self.model, 1.0
        # by module of the Hugging Face model, which may combine several of our weights
        stored: dict[str, list[Factors]] = {}
        of_experts = []
        for factors in self:
            scale = factors.scale
            if peft_experts.EXPERT.fullmatch(factors.tensor):
                of_experts.append(factors)
                continue
            name = huggingface_tensor(model, factors.tensor).name
            stored.setdefault(name.removesuffix(".weight"), []).append(factors)
        tensors, modules = {}, set()
        for module, parts in stored.items():
            # In GPT-2, two modules share the last part of their names.
            modules.add(".".join(module.split(".")[-2 if model.architecture == "gpt" else -1 :]))
            tensors[f"{MODULE}{module}.lora_A.weight"] = parts[0].a.clone()
            tensors[f"{MODULE}{module}.lora_B.weight"] = torch.cat([part.b for part in parts])
        fused, parameters = peft_experts.stacked(model, of_experts)
        tensors |= {f"{MODULE}{name}": tensor for name, tensor in fused.items()}
        configuration = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base,
            "r": self.rank,
            "lora_alpha": scale * self.rank,
            "lora_dropout": self.dropout,
            "target_modules": sorted(modules),
            **({"target_parameters": parameters} if parameters else {}),
            "fan_in_fan_out": model.architecture == "gpt",
            "bias": "none",
            "inference_mode": True,
        }
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        (folder / CONFIG).write_text(json.dumps(configuration, indent=1) + "\n")
        return {"tensors": len(tensors), "bytes": sum(tensor.nbytes for tensor in tensors.values())}


class TrainedAdapters(Adapters):
    """The adapters of a complete checkpoint. Raises ValueError if it has none, or is corrupted."""

    def __init__(self, folder: Path) -> None:
        about = checkpoint.read_marker(folder)
        profile = Profile.model_validate(about["profile"])
        if not profile.lora.rank:
            raise ValueError(f"{folder}: is not a checkpoint of adapters")
        self.model, self._lora, self.base = profile.model, profile.lora, profile.init.from_
        self.rank, self.dropout, self.dtype = (
            profile.lora.rank,
            profile.lora.dropout,
            DTYPES[profile.train.precision],
        )
        self._reader = Reader(folder, about.get("files"))

    def __iter__(self) -> Iterator[Factors]:
        rank, targets, model = self.rank, self._lora.targets, self.model
        for number in range(model.num_hidden_layers):
            for layer in layers_of(model, number):
                groups, prefix = layer.groups(targets), f"layers.{number}.{layer.path}"
                if layer.experts and groups:
                    yield from self._of_experts(layer, prefix)
                    continue
                whole = len(groups) == 1 and len(groups[0]) == len(layer.sections)
                for index, group in enumerate(groups):
                    a = self._read(f"{prefix}.lora.a", "" if whole else "_".join(group))
                    for section in group:
                        b = self._read(f"{prefix}.lora.b", section)[:, index * rank : (index + 1) * rank]
                        yield Factors(_name(prefix, section), a, b, self._lora.alpha / rank)

    def _of_experts(self, layer: Layer, prefix: str) -> Iterator[Factors]:
        for expert in range(layer.experts or 0):
            a = self._read(f"{prefix}.lora.a", str(expert))
            for section in layer.sections.values():
                name = f"{expert}.{section}" if section else str(expert)
                b = self._read(f"{prefix}.lora.b", name)
                yield Factors(_name(prefix, name), a, b, self._lora.alpha / self.rank)

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


class PeftAdapters(Adapters):
    """The adapters in PEFT's folder. Raises ValueError if it uses features beyond plain LoRA."""

    def __init__(self, folder: Path, model: Model) -> None:
        from safetensors.torch import load_file

        self.model, configuration = model, json.loads((folder / CONFIG).read_text())
        plain = {
            "peft_type": "LORA",
            "use_dora": False,
            "bias": "none",
            "rank_pattern": {},
            "alpha_pattern": {},
        }
        for name, value in plain.items():
            if (configuration.get(name) or value) != value:
                raise ValueError(f"{folder / CONFIG}: {name} = {configuration[name]} is not supported")
        self.rank, self.dropout = configuration["r"], configuration.get("lora_dropout", 0.0)
        self.base = configuration.get("base_model_name_or_path")
        self._scale = scale_of(configuration, self.rank)
        self._parameters = configuration.get("target_parameters") or []
        self._tensors = load_file(folder / WEIGHTS)

    def __iter__(self) -> Iterator[Factors]:
        left = set(self._tensors)
        for tensor in global_shapes(self.model):
            where = huggingface_tensor(self.model, tensor)
            names = [f"{MODULE}{where.name.removesuffix('.weight')}.lora_{letter}.weight" for letter in "AB"]
            if names[0] not in self._tensors:
                continue
            left -= {*names}
            a, b = (self._tensors[name].float() for name in names)
            rows = where.index[-1 if where.transposed else 0] if where.index else slice(None)
            yield Factors(tensor, a, b[rows], self._scale)
        tensors = {name.removeprefix(MODULE): tensor for name, tensor in self._tensors.items()}
        for tensor, a, b, names in peft_experts.unstacked(self.model, tensors, self.rank, self._parameters):
            left -= {f"{MODULE}{name}" for name in names}
            yield Factors(tensor, a, b, self._scale)
        if left:
            raise ValueError(f"the adapters have tensors for weights that the model lacks: {min(left)}")


def read_adapters(folder: Path, config: Path | None = None, layout: NxDLayout | None = None) -> Adapters:
    """The adapters in a LoRA run or checkpoint, in NxD shards, or in PEFT's folder.

    Args:
        config: config.json of the model or its folder, required for NxD shards and PEFT's folder.
        layout: layout of NxD shards.

    Raises:
        ProfileError: no adapters, or `config` or `layout` is required.
        ValueError: a file is rejected or corrupted.
    """
    from modeling.conversion.nxd import files as nxd_files
    from modeling.conversion.nxd.lora import NxDAdapters

    folder = formats.locate(folder)
    if (folder / locations.MARKER).is_file():
        return TrainedAdapters(folder)
    shards = nxd_files.find_shards(folder) if folder.is_dir() else {}
    if not shards and not (folder / WEIGHTS).is_file():
        reason = "has no adapters: no checkpoint of a LoRA run, no NxD shards, no adapter_model.safetensors of PEFT"
        raise ProfileError("--adapters", str(folder), reason if folder.exists() else "does not exist")
    if config is None:
        raise ProfileError(
            "--config", None, "is missing: adapters have no config of the model; name its config.json"
        )
    model = formats.read_config(config)
    return NxDAdapters(folder, shards, model, layout) if shards else PeftAdapters(folder, model)


def scale_of(configuration: Mapping[str, Any], rank: int) -> float:
    """The factor of B A: alpha / rank, or alpha / √rank for rsLoRA."""
    return configuration["lora_alpha"] / (math.sqrt(rank) if configuration.get("use_rslora") else rank)


def _name(prefix: str, section: str) -> str:
    return ".".join(part for part in (prefix, section, "weight") if part)


def _add(part: Part, factors: Factors, index: tuple[slice, ...]) -> Tensor:
    offsets = tuple(offset + at.start for offset, at in zip(part.offsets, index, strict=True))
    return part.read(index).float() + factors.of(offsets, tuple(at.stop - at.start for at in index))
