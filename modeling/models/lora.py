"""LoRA updates of a model's blocks; other weights are frozen."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from modeling.models.language_model import LanguageModel, ShardOptions
from modeling.models.lora_targets import layers_of
from parallel import ColumnParallelLinear, GQAQKVColumnParallelLinear, Mesh, RowParallelLinear
from parallel.experts.lora import ExpertUpdate
from parallel.layers.deferred import DeferrableLinear
from parallel.layers.linear import ReplicatedLinear
from parallel.layers.lora import ZERO, LowRankUpdate, attach, first_factor, keep_sections_apart
from parallel.layout import layout_of
from profiles.schema import Lora
from profiles.sections.base import required
from profiles.sections.model import Model

FIRST_SITE = 4  # first dropout site of updates; blocks use the lower ones


def apply_lora(stage: LanguageModel, lora: Lora, model: Model, mesh: Mesh, sequence_parallel: bool) -> None:
    """Freeze a stage's weights, and attach the updates of its blocks' layers."""
    stage.requires_grad_(False)
    stage.update_dropout = lora.dropout
    for number, block in stage.layers.items():
        for site, layer in enumerate(layers_of(model, int(number)), FIRST_SITE):
            if not (groups := layer.groups(lora.targets)):
                continue
            linear = block.get_submodule(layer.path)
            if layer.experts:
                rank = required(lora.rank)
                linear.lora = ExpertUpdate(linear.get_parameter("weight"), rank, lora.alpha / rank)
            else:
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
    weight, rank = linear.get_parameter("weight"), required(lora.rank)
    options: ShardOptions = {
        "dtype": weight.dtype,
        "device": weight.device,
        "sequence_parallel": sequence_parallel,
    }
    sections = {section.name: section.shape[0] for section in layout_of(weight).sections}
    in_features = layout_of(weight).sections[0].shape[1]
    scale, initial = lora.alpha / rank, first_factor(in_features)
    if isinstance(linear, RowParallelLinear):
        # Global numbers of this rank's features: they key dropout. A buffer, so that no graph depends on the rank.
        local = in_features // mesh.tensor.size
        columns = torch.arange(local, device=weight.device) + mesh.tensor.rank * local
        return LowRankUpdate(
            RowParallelLinear(in_features, rank, mesh.tensor, initializer=initial, **options),
            ReplicatedLinear(rank, sections[""], mesh.tensor, initializer=ZERO, **options),
            scale,
            lora.dropout,
            site,
            columns if lora.dropout else None,
        )
    whole = len(groups) == 1 and len(groups[0]) == len(sections)
    sizes = rank if whole else {"_".join(group): rank for group in groups}
    a = ReplicatedLinear(in_features, sizes, mesh.tensor, initializer=initial, **options)
    width = rank * len(groups)
    b: DeferrableLinear
    if isinstance(linear, GQAQKVColumnParallelLinear):
        heads = model.num_attention_heads, model.num_key_value_heads, model.head_dim
        b = GQAQKVColumnParallelLinear(width, *heads, mesh, initializer=ZERO, **options)
    else:
        b = ColumnParallelLinear(width, sections, mesh.tensor, initializer=ZERO, **options)
    if not whole:
        keep_sections_apart(b, groups, rank)
    return LowRankUpdate(a, b, scale, lora.dropout, site)
