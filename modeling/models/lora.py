"""LoRA for a model's blocks: which layers get updates, under our names or Hugging Face's, and freezing of all other weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from modeling.models.language_model import LanguageModel
from parallel import ColumnParallelLinear, GQAQKVColumnParallelLinear, Mesh, RowParallelLinear
from parallel.layers.linear import ReplicatedLinear
from parallel.layers.lora import (
    ZERO,
    LowRankUpdate,
    attach,
    first_factor,
    keep_sections_apart,
)
from parallel.layout import layout_of
from profiles.schema import Lora
from profiles.sections.model import Model

# Layers of a block: their path, and their sections by the target that names one of them.
Layer = tuple[str, dict[str, str]]
LAYERS: dict[str, Layer] = {
    "qkv": ("attention.qkv", {"q_proj": "q", "k_proj": "k", "v_proj": "v"}),
    "output": ("attention.output", {"o_proj": ""}),
    "gate_up": ("mlp.gate_up", {"gate_proj": "gate", "up_proj": "up"}),
    "down": ("mlp.down", {"down_proj": ""}),
}
GPT_LAYERS: dict[str, Layer] = {**LAYERS, "gate_up": ("mlp.up", {"up_proj": ""})}
FIRST_SITE = 4  # of dropout; blocks have sites of their own below


def layers_of(model: Model) -> dict[str, Layer]:
    """The layers of a model's blocks by the target that names all of each."""
    return GPT_LAYERS if model.architecture == "gpt" else LAYERS


def groups_of(layer: str, targets: Sequence[str], model: Model) -> list[tuple[str, ...]]:
    """The sections of a layer that share a first factor, one group for each; empty if nothing of the layer is a target."""
    sections = layers_of(model)[layer][1]
    if layer in targets:
        return [tuple(sections.values())]
    return [(section,) for target, section in sections.items() if target in targets]


def apply_lora(stage: LanguageModel, lora: Lora, model: Model, mesh: Mesh, sequence_parallel: bool) -> None:
    """Freeze a stage's weights, and attach the updates of its blocks' layers."""
    stage.requires_grad_(False)
    stage.update_dropout = lora.dropout
    for block in stage.layers.values():
        for site, (layer, (path, _)) in enumerate(layers_of(model).items(), FIRST_SITE):
            if groups := groups_of(layer, lora.targets, model):
                linear = block.get_submodule(path)
                attach(linear, _update(linear, groups, lora, model, mesh, sequence_parallel, site))


def _update(
    linear: nn.Module,
    groups: Sequence[Sequence[str]],
    lora: Lora,
    model: Model,
    mesh: Mesh,
    sequence_parallel: bool,
    site: int,
) -> LowRankUpdate:
    options = {"dtype": linear.weight.dtype, "device": linear.weight.device}
    options["sequence_parallel"] = sequence_parallel
    sections = {section.name: section.shape[0] for section in layout_of(linear.weight).sections}
    in_features = layout_of(linear.weight).sections[0].shape[1]
    rank, scale, initial = lora.rank, lora.alpha / lora.rank, first_factor(in_features)
    if isinstance(linear, RowParallelLinear):
        a = RowParallelLinear(in_features, rank, mesh.tensor, initializer=initial, **options)
        b = ReplicatedLinear(rank, sections[""], mesh.tensor, initializer=ZERO, **options)
        # Global numbers of this rank's features: they key dropout. A buffer, so that no graph depends on the rank.
        local = in_features // mesh.tensor.size
        columns = torch.arange(local, device=options["device"]) + mesh.tensor.rank * local
        return LowRankUpdate(a, b, scale, lora.dropout, site, columns if lora.dropout else None)
    whole = len(groups) == 1 and len(groups[0]) == len(sections)
    sizes = rank if whole else {"_".join(group): rank for group in groups}
    a = ReplicatedLinear(in_features, sizes, mesh.tensor, initializer=initial, **options)
    width, options["initializer"] = rank * len(groups), ZERO
    if isinstance(linear, GQAQKVColumnParallelLinear):
        heads = model.num_attention_heads, model.num_key_value_heads, model.head_dim
        b: nn.Module = GQAQKVColumnParallelLinear(width, *heads, mesh, **options)
    else:
        b = ColumnParallelLinear(width, sections, mesh.tensor, **options)
    if not whole:
        keep_sections_apart(b.weight, groups, rank)
    return LowRankUpdate(a, b, scale, lora.dropout, site)
