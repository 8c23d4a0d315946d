"""LoRA for a model's blocks: which layers get updates, under our names or Hugging Face's, and freezing of all other weights."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from modeling.models.language_model import LanguageModel
from parallel import ColumnParallelLinear, GQAQKVColumnParallelLinear, Mesh, RowParallelLinear
from parallel.layers.lora import (
    ZERO,
    LowRankUpdate,
    ReplicatedLinear,
    attach,
    first_factor,
    keep_sections_apart,
)
from parallel.layout import layout_of
from profiles.model import Model
from profiles.schema import Lora

# Layers of a block: their path, and the targets that name one of their sections.
PATHS = {"qkv": "attention.qkv", "output": "attention.output", "gate_up": "mlp.gate_up", "down": "mlp.down"}
SECTIONS = {
    "qkv": {"q_proj": "q", "k_proj": "k", "v_proj": "v"},
    "gate_up": {"gate_proj": "gate", "up_proj": "up"},
    "output": {"o_proj": ""},
    "down": {"down_proj": ""},
}


def groups_of(layer: str, targets: Sequence[str]) -> list[tuple[str, ...]]:
    """The sections of a layer that share a first factor, one group for each; empty if nothing of the layer is a target."""
    sections = SECTIONS[layer]
    if layer in targets:
        return [tuple(sections.values())]
    return [(section,) for target, section in sections.items() if target in targets]


def apply_lora(stage: LanguageModel, lora: Lora, model: Model, mesh: Mesh, sequence_parallel: bool) -> None:
    """Freeze a stage's weights, and attach the updates of its blocks' layers."""
    stage.requires_grad_(False)
    for block in stage.layers.values():
        for layer, path in PATHS.items():
            if groups := groups_of(layer, lora.targets):
                linear = block.get_submodule(path)
                attach(linear, _update(linear, layer, groups, lora, model, mesh, sequence_parallel))


def _update(
    linear: nn.Module,
    layer: str,
    groups: Sequence[Sequence[str]],
    lora: Lora,
    model: Model,
    mesh: Mesh,
    sequence_parallel: bool,
) -> LowRankUpdate:
    options = {"dtype": linear.weight.dtype, "device": linear.weight.device}
    options["sequence_parallel"] = sequence_parallel
    sections = {section.name: section.shape[0] for section in layout_of(linear.weight).sections}
    in_features = layout_of(linear.weight).sections[0].shape[1]
    rank, scale, initial = lora.rank, lora.alpha / lora.rank, first_factor(in_features)
    if isinstance(linear, RowParallelLinear):
        a = RowParallelLinear(in_features, rank, mesh.tensor, initializer=initial, **options)
        b = ReplicatedLinear(rank, sections[""], mesh.tensor, **options)
        return LowRankUpdate(a, b, scale)
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
    return LowRankUpdate(a, b, scale)
