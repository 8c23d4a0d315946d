"""Other names and forms of hybrid models' tensors in files, converted to those of `hybrid.py`.

transformers saves OLMo Hybrid's filters cut into three equal parts, whatever the sizes of queries and values, and the norms of
its layers under the names of other layers. Qwen3.5's published weights are a part of a model with vision.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import partial

import torch
from torch import Tensor

from modeling.conversion.torch_files import LazyTensor
from profiles.sections.model import Model

PREDICTION = "mtp."  # prefix of the module for multi-token prediction
VISION = "model.visual."
LEFT_OUT = "vision, which is not supported for this model"
_LANGUAGE = "model.language_model."
_LAYER = re.compile(r"(.*layers\.(\d+)\.)(\w+)\.weight")


def has_module(found: Collection[str], model: Model) -> bool:
    """Whether tensors of these names include a module for multi-token prediction of a hybrid."""
    fields = model.family.fields if model.family.linear_attention != "none" else ()
    return "num_nextn_predict_layers" in fields and any(name.startswith(PREDICTION) for name in found)


def is_left_out(name: str, model: Model) -> bool:
    """Whether a tensor is of vision, which is no part of the text model."""
    return model.family.linear_attention != "none" and name.startswith(VISION)


def normalized(found: Mapping[str, LazyTensor], model: Model) -> dict[str, LazyTensor]:
    """A model's tensors under the names that `hybrid.py` maps ours to.

    Raises:
        ValueError: two tensors have the same name.
    """
    kind = model.family.linear_attention
    if kind == "none":
        return dict(found)
    result: dict[str, LazyTensor] = {}
    for name, tensor in found.items():
        stored = "model." + name.removeprefix(_LANGUAGE) if name.startswith(_LANGUAGE) else name
        if kind == "separate":
            stored = _olmo_norm(stored, model)
        if stored in result:
            raise ValueError(f"{name}: {stored} is in the files too; delete one of them")
        result[stored] = tensor
    return _split_filters(result, model) if kind == "separate" else result


def _olmo_norm(name: str, model: Model) -> str:
    """The published name of a layer's norm."""
    found = _LAYER.fullmatch(name)
    if found is None or int(found[2]) >= model.num_hidden_layers:
        return name
    if model.is_linear(int(found[2])):
        names = {
            "input_layernorm": "attention_layer_norm",
            "post_attention_layernorm": "feedforward_layer_norm",
        }
    else:
        names = {"feedforward_layer_norm": "post_attention_layernorm"}
    return f"{found[1]}{names.get(found[3], found[3])}.weight"


def _split_filters(found: dict[str, LazyTensor], model: Model) -> dict[str, LazyTensor]:
    """Filters of queries, keys and values, from one tensor or three with any division of the rows."""
    sizes = [model.linear_widths[part] for part in "qkv"]
    for layer in range(model.num_hidden_layers):
        prefix = f"model.layers.{layer}.linear_attn"
        names = [f"{prefix}.{part}_conv1d.weight" for part in "qkv"]
        stored = [f"{prefix}.conv1d.weight"] if f"{prefix}.conv1d.weight" in found else names
        if not all(name in found for name in stored):
            continue
        parts = [found[name] for name in stored]
        rows = sum(part.shape[0] for part in parts)
        if [part.shape[0] for part in parts] == sizes or rows != sum(sizes):
            continue
        for name in stored:
            del found[name]
        start = 0
        for name, size in zip(names, sizes, strict=True):
            opened = partial(_rows, parts, start, start + size)
            found[name] = LazyTensor((size, *parts[0].shape[1:]), parts[0].dtype, opened)
            start += size
    return found


def _rows(parts: list[LazyTensor], low: int, high: int) -> Tensor:
    return torch.cat([part.open() for part in parts])[low:high]
