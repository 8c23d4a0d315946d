"""Analytic FLOP count of a model: the definition behind MFU and pipeline balance.

Counts what the mathematics needs: no recomputation, padding, norms or element-wise work. The FLOPs that a rank executes
are counted operator by operator (modeling/planning/operator_costs.py).
"""

from __future__ import annotations

from functools import cache

from profiles.schema import Profile


def layer_multiply_adds(profile: Profile) -> list[int]:
    """Forward multiply-adds per token of each layer; the last includes the language-model head.

    Per layer: h·d·(2n + 2k) of the attention projections (of latent attention, including those from and to the latents), 3·h·f
    (gated) or 2·h·f (gpt) of the MLP, and 2·n·d for each key that a token sees on average: s/2 in causal attention, w - w²/2s in
    a sliding window of w. Of experts, the router and the MLPs of a token's routed and shared experts count. LoRA's updates are
    not included.
    """
    layers = [weights + scores for weights, scores in _weights_and_scores(profile)]
    layers[-1] += _head(profile)
    return layers


def _weights_and_scores(profile: Profile) -> list[tuple[int, int]]:
    """Forward multiply-adds per token of each layer: of its weights, and of attention's scores and values."""
    model, s = profile.model, profile.train.sequence_length
    h, both = model.hidden_size, model.head_dim + (model.v_head_dim or model.head_dim)
    matrices = model.family.mlp_matrices

    @cache
    def of_kind(has_experts: bool, window: int | None) -> tuple[int, int]:
        mlp = matrices * h * model.intermediate_size
        if has_experts:
            experts = model.num_experts_per_tok + (model.n_shared_experts or 0)
            mlp = experts * matrices * h * model.expert_width + h * model.num_experts
        scores = int(visible_keys(s, window) * model.num_attention_heads * both)
        return model.projection_weights + mlp, scores

    return [of_kind(model.has_experts(i), model.window(i)) for i in range(model.num_hidden_layers)]


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
    model, targets = profile.model, profile.lora.targets
    if not profile.lora.rank or not model.num_experts:
        return 0
    h, f = model.hidden_size, model.expert_width
    widths = (h + 2 * f) * ("gate_up" in targets) + (f + h) * bool({"down", "down_proj"} & {*targets})
    idle = model.num_experts - model.num_experts_per_tok
    return profile.lora.rank * widths * idle * model.num_expert_layers


def _updates(profile: Profile, number: int) -> int:
    """Forward multiply-adds per token of a layer's LoRA: rank · (inputs + outputs) per first factor.

    Updates of experts count once for each of a token's experts.
    """
    model, targets = profile.model, profile.lora.targets
    h, f, heads = model.hidden_size, model.intermediate_size, model.num_attention_heads
    q, kv = heads * model.head_dim, model.num_key_value_heads * model.head_dim
    mlps = 1
    if model.has_experts(number):
        f, mlps = model.expert_width, model.num_experts_per_tok
    shared = (model.n_shared_experts or 0) * f if model.has_experts(number) else 0
    layers = [(1, "output", heads * (model.v_head_dim or model.head_dim), {"o_proj": h})]
    if model.kv_lora_rank is None:
        layers.append((1, "qkv", h, {"q_proj": q, "k_proj": kv, "v_proj": kv}))
    for count, width in ((mlps, f), (1, shared)) if shared else ((mlps, f),):
        gated = {"gate_proj": width} if model.family.mlp_matrices == 3 else {}
        layers.append((count, "gate_up", h, {**gated, "up_proj": width}))
        layers.append((count, "down", width, {"down_proj": h}))
    widths = 0
    for count, layer, width, sections in layers:
        if layer in targets:
            widths += count * (width + sum(sections.values()))
        widths += count * sum(width + size for name, size in sections.items() if name in targets)
    return profile.lora.rank * widths
