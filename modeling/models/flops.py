"""The FLOP count of a model, and how its layers are divided into pipeline stages by it."""

from __future__ import annotations

from parallel.pipeline.schedules import forwards_ahead
from parallel.pipeline.stages import cut_layers
from profiles.schema import Profile


def costs(profile: Profile) -> list[int]:
    """Multiply-adds a token, forward: of each layer's weights and its causal attention; of the head, with the last layer."""
    model, s = profile.model, profile.train.sequence_length
    h, d = model.hidden_size, model.head_dim
    projections = h * d * (2 * model.num_attention_heads + 2 * model.num_key_value_heads)
    matrices = {"llama": 3, "gpt": 2}[model.architecture]
    layer = projections + matrices * h * model.intermediate_size + s * model.num_attention_heads * d
    return [layer] * (model.num_hidden_layers - 1) + [layer + model.vocab_size * h]


def stage_layers(profile: Profile) -> list[range]:
    """The layers of every pipeline stage."""
    parallel = profile.parallel
    return cut_layers(costs(profile), parallel.pipeline, parallel.schedule, parallel.pipeline_cuts)


def ahead(profile: Profile) -> int:
    """Forwards that ranks before the last run ahead."""
    if profile.parallel.schedule != "1f1b":
        return 0
    each = costs(profile)
    stages = [sum(each[layer] for layer in layers) for layers in stage_layers(profile)]
    return forwards_ahead(stages, profile.accumulation_steps)


def flops_per_token(profile: Profile) -> float:
    """Training FLOPs a token: 6 a multiply-add of the forward pass, 2 there and 4 in backward."""
    return 6 * sum(costs(profile))
