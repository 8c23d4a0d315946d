"""Analytic FLOP count of a model: the definition behind MFU and pipeline balance.

Counts what the mathematics needs: no recomputation, padding, norms or element-wise work. The FLOPs that a rank executes
are counted operator by operator (modeling/planning/operator_costs.py).
"""

from __future__ import annotations

from functools import cache

from modeling.models.lora_targets import layers_of
from parallel.attention import delta_rule
from profiles.schema import Profile
from profiles.sections.base import required
from profiles.sections.model_checks import LINEAR


def layer_multiply_adds(profile: Profile) -> list[int]:
    """Forward multiply-adds per token of each layer; the last includes head and multi-token prediction.

    Per layer: h·d·(2n + 2k) of the attention projections (of latent attention, including those from and to the latents), 3·h·f
    (gated) or 2·h·f (gpt) of the MLP, and 2·n·d for each key that a token sees on average: s/2 in causal attention, w - w²/2s in
    a sliding window of w. Of a Gated DeltaNet, the convolution and the products of its rule (`delta_rule.multiply_adds`) count
    instead. Of experts, the router and the MLPs of a token's routed and shared experts count. LoRA's updates are not included. A
    module for multi-token prediction is a layer with a projection of 2·h² and the head.
    """
    costs = [weights + scores for weights, scores in _weights_and_scores(profile)]
    layers, modules = costs[: profile.model.num_hidden_layers], costs[profile.model.num_hidden_layers :]
    layers[-1] += _head(profile) + sum(modules)
    layers[-1] += len(modules) * (_head(profile) + profile.model.projection_of_module)
    return layers


def _weights_and_scores(profile: Profile) -> list[tuple[int, int]]:
    """Forward multiply-adds per token of each layer: of its weights, and of attention's scores and values."""
    model, s = profile.model, profile.train.sequence_length
    both = model.num_attention_heads * (model.head_dim + (model.v_head_dim or model.head_dim))

    @cache
    def of_kind(has_experts: bool, window: int | None, linear: bool) -> tuple[int, int]:
        weights = model.layer_weights(model.num_experts_per_tok if has_experts else None, linear)
        return weights, _rule(profile) if linear else int(visible_keys(s, window) * both)

    kinds = [(model.has_experts(i), model.window(i), model.is_linear(i)) for i in range(model.num_layers)]
    return [of_kind(*kind) for kind in kinds]


def _rule(profile: Profile) -> int:
    """Forward multiply-adds per token of a Gated DeltaNet besides its projections."""
    model = profile.model
    _, n, d, u, taps = (int(getattr(model, name)) for name in LINEAR)
    convolved = sum(model.linear_widths[part] for part in "qkv") * taps
    return convolved + n * delta_rule.multiply_adds(d, u)


def _head(profile: Profile) -> int:
    return profile.model.vocab_size * profile.model.hidden_size


def visible_keys(sequence: int, window: int | None = None) -> float:
    """Keys that a query of causal attention sees on average, within a sliding window if there is one."""
    width = sequence if window is None else min(window, sequence)
    return width - width**2 / (2 * sequence)


def flops_per_token(profile: Profile) -> float:
    """Training FLOPs per token: 6 per forward multiply-add, 2 in forward and 4 in backward.

    A weight that LoRA freezes has no gradient, so its multiply-adds count 4; those of the updates count 6.
    """
    if not profile.lora.rank:
        return 6 * sum(layer_multiply_adds(profile))
    layers = _weights_and_scores(profile)
    frozen = sum(weights for weights, _ in layers) + _head(profile)
    trained = sum(scores for _, scores in layers) + sum(_updates(profile, i) for i in range(len(layers)))
    return 4 * frozen + 6 * trained


def idle_updates(profile: Profile) -> int:
    """Parameters of LoRA's updates of the experts that a token is not routed to, over all layers."""
    model, lora = profile.model, profile.lora
    layers = [layer for number in range(model.num_hidden_layers) for layer in layers_of(model, number)]
    sizes = sum(layer.update_size(lora.targets) for layer in layers if layer.experts)
    return (lora.rank or 0) * sizes * ((model.num_experts or 0) - (model.num_experts_per_tok or 0))


def _updates(profile: Profile, number: int) -> int:
    """Forward multiply-adds per token of a layer's LoRA; updates of experts count for a token's experts."""
    model, lora = profile.model, profile.lora
    return required(lora.rank) * sum(
        layer.update_size(lora.targets) * (required(model.num_experts_per_tok) if layer.experts else 1)
        for layer in layers_of(model, number)
    )
