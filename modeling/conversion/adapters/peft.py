"""LoRA adapters in PEFT's format: a folder with adapter_config.json and adapter_model.safetensors.

It has one A per projection, so that a shared A is copied.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modeling.conversion import huggingface
from modeling.conversion.adapters import peft_experts
from modeling.conversion.adapters.adapters import Adapters, Factors
from modeling.conversion.weights import global_shapes
from modeling.models.families import huggingface_tensor
from profiles.files import state_files
from profiles.sections.model import Model

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MODULE = "base_model.model."  # prefix of the names of PEFT's tensors
# Keys whose only supported value is this one, or none.
PLAIN: Mapping[str, Any] = {
    "peft_type": "LORA",
    "bias": "none",
    "use_dora": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "modules_to_save": None,  # trained entirely
    "trainable_token_indices": None,
    "lora_bias": False,
    "layer_replication": None,  # the base model's layers are repeated
    "alora_invocation_tokens": None,  # the updates apply to some tokens only
    "use_qalora": False,  # the updates apply to pooled inputs
    "use_bdlora": None,  # the factors are block-diagonal
    "arrow_config": None,  # the updates are weighted for each token
    "kasa_config": None,  # the base model's weights are truncated
    "monteclora_config": None,  # the updates are sampled
}
READ = (
    *("r", "lora_alpha", "use_rslora", "lora_dropout", "base_model_name_or_path", "target_parameters"),
    "init_lora_weights",
)
# Keys that change neither the tensors in the file nor what they mean: which layers were selected, how factors were initialized,
# how PEFT loads or trains them.
WITHOUT_EFFECT = (
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "fan_in_fan_out"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "velora_config", "qalora_group_size"),
    *("auto_mapping", "inference_mode", "peft_version", "revision", "task_type", "runtime_config"),
    *("megatron_config", "megatron_core", "ensure_weight_tying"),
)
# prefixes of init_lora_weights with which PEFT subtracts the initial update from the weights, or quantizes them
CHANGE_BASE = ("pissa", "olora", "corda", "lora_ga", "loftq")


class PeftAdapters(Adapters):
    """The adapters in PEFT's folder. Raises ValueError if it is corrupted, or more than plain LoRA."""

    def __init__(self, folder: Path, model: Model) -> None:
        self.model, configuration = model, read_configuration(folder / CONFIG)
        require_known(configuration, PLAIN, (*READ, *WITHOUT_EFFECT), folder / CONFIG)
        initialization = str(configuration.get("init_lora_weights", True))
        if initialization.lower().startswith(CHANGE_BASE):
            raise ValueError(
                f"{folder / CONFIG}: init_lora_weights = {initialization} is not supported: it changed the weights that the "
                "adapters update, so that merging into the original weights would be wrong; save the adapters in PEFT with "
                "path_initial_model_for_weight_conversion, or merge them in PEFT and convert the merged model"
            )
        self.rank = required(configuration, "r", folder / CONFIG)
        self.dropout = configuration.get("lora_dropout", 0.0)
        self.base = configuration.get("base_model_name_or_path")
        self._scale = scale_of(configuration, self.rank, folder / CONFIG)
        self._parameters = configuration.get("target_parameters") or []
        found = huggingface.read_safetensors(folder / WEIGHTS)
        self._tensors = {name: tensor.open() for name, tensor in found.items()}
        for name in self._tensors:
            if (other := name.replace(".lora_A.", ".lora_B.")) not in self._tensors:
                raise ValueError(f"{folder / WEIGHTS}: {other} is missing")

    def __iter__(self) -> Iterator[Factors]:
        left = set(self._tensors)
        for tensor in global_shapes(self.model):
            where = huggingface_tensor(self.model, tensor)
            names = [f"{MODULE}{where.name.removesuffix('.weight')}.lora_{letter}.weight" for letter in "AB"]
            if names[0] not in self._tensors:
                continue
            left -= {*names}
            a, b = (self._tensors[name].float() for name in names)
            # b is (out, rank) even where the weight is (in, out)
            if not where.transposed:
                b = where.read(b)
            elif where.index:
                b = b[where.index[-1]]
            yield Factors(tensor, a, b, self._scale)
        tensors = {name.removeprefix(MODULE): tensor for name, tensor in self._tensors.items()}
        for tensor, a, b, names in peft_experts.unstacked(self.model, tensors, self.rank, self._parameters):
            left -= {f"{MODULE}{name}" for name in names}
            yield Factors(tensor, a, b, self._scale)
        if left:
            raise ValueError(f"the adapters have tensors for weights that the model lacks: {min(left)}")


def write(adapters: Adapters, folder: Path) -> dict[str, int]:
    """Write adapters to PEFT's folder; returns the number and bytes of its tensors.

    Raises:
        ValueError: PEFT has no format for updates of experts of this architecture.
    """
    from safetensors.torch import save_file

    model, scale = adapters.model, 1.0
    # by module of the Hugging Face model, which may combine several of our weights
    stored: dict[str, list[Factors]] = {}
    of_experts = []
    for factors in adapters:
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
        tensors[f"{MODULE}{module}.lora_B.weight"] = _second_factor(model, parts)
    fused, parameters = peft_experts.stacked(model, of_experts)
    tensors |= {f"{MODULE}{name}": tensor for name, tensor in fused.items()}
    configuration = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapters.base,
        "r": adapters.rank,
        "lora_alpha": scale * adapters.rank,
        "lora_dropout": adapters.dropout,
        "target_modules": sorted(modules),
        **({"target_parameters": parameters} if parameters else {}),
        "fan_in_fan_out": model.architecture == "gpt",
        "bias": "none",
        "inference_mode": True,
    }
    state_files.make_folder(folder)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(configuration, indent=1) + "\n")
    return {"tensors": len(tensors), "bytes": sum(tensor.nbytes for tensor in tensors.values())}


def _second_factor(model: Model, parts: Sequence[Factors]) -> Tensor:
    """The second factor of a module, of whose weight each part's tensor is a part."""
    places = [huggingface_tensor(model, part.tensor) for part in parts]
    stored = torch.cat([part.b for part in parts])
    if places[0].group_count > 1:
        for part, where in zip(parts, places, strict=True):
            stored[where.rows_in(len(stored), len(part.b))] = part.b
    return stored


def read_configuration(path: Path) -> Mapping[str, Any]:
    """The contents of adapter_config.json. Raises ValueError if it is missing or corrupted."""
    if (data := state_files.read(path)) is None:
        raise ValueError(f"{path}: missing")
    return state_files.require_json(data, path)


def require_known(
    configuration: Mapping[str, Any], plain: Mapping[str, Any], known: Collection[str], file: Path
) -> None:
    """Raise ValueError for a setting that is not supported, or may change what the adapters mean.

    A setting of a later version that is off (null, false or empty) changes nothing.

    Args:
        plain: the only supported value of each key.
        known: further keys, of which every value is supported.
    """
    for name, value in configuration.items():
        if not value or name in known or (name in plain and value == plain[name]):
            continue
        reason = "is not supported" if name in plain else "is not a known setting of LoRA, and may change it"
        raise ValueError(
            f"{file}: {name} = {value} {reason}; merge the adapters with the program that wrote them"
        )


def required(configuration: Mapping[str, Any], name: str, file: Path) -> Any:
    """A key of the configuration in a file. Raises ValueError if it is missing."""
    if configuration.get(name) is None:
        raise ValueError(f"{file}: {name} is missing")
    return configuration[name]


def scale_of(configuration: Mapping[str, Any], rank: int, file: Path) -> float:
    """The factor of B A: alpha / rank, or alpha / √rank for rsLoRA. Raises ValueError without alpha."""
    alpha = required(configuration, "lora_alpha", file)
    return alpha / (math.sqrt(rank) if configuration.get("use_rslora") else rank)
