"""Analytic FLOP count of a model: the definition behind MFU and pipeline balance.

Counts what the mathematics needs: no recomputation, padding, norms or element-wise work. What a rank really
multiplies is counted operator by operator (modeling/planning/operator_costs.py).
"""

from __future__ import annotations

from profiles.schema import Profile


def layer_multiply_adds(profile: Profile) -> list[int]:
    """Forward multiply-adds per token of each layer; the last includes the language-model head.

    Per layer: h·d·(2n + 2k) of the attention projections, 3·h·f (gated) or 2·h·f (gpt) of the MLP, and 2·n·d for each key that a
    token sees on average: s/2 in causal attention, w - w²/2s in a sliding window of w. Of experts, the MLPs of a token's own ones
    and the router count.
    """
    model, s = profile.model, profile.train.sequence_length
    h, d = model.hidden_size, model.head_dim
    projections = h * d * (2 * model.num_attention_heads + 2 * model.num_key_value_heads)
    matrices = 2 if model.architecture == "gpt" else 3  # gate, up, down
    mlp = matrices * h * model.expert_width
    if model.num_experts is not None:
        mlp = model.num_experts_per_tok * mlp + h * model.num_experts
    weights = projections + mlp
    windows = [model.window(layer) for layer in range(model.num_hidden_layers)]
    layers = [
        weights + int(2 * visible_keys(s, window) * model.num_attention_heads * d) for window in windows
    ]
    layers[-1] += model.vocab_size * h
    return layers


def visible_keys(sequence: int, window: int | None = None) -> float:
    """Keys that a query of causal attention sees on average, within a sliding window if there is one."""
    width = sequence if window is None else min(window, sequence)
    return width - width**2 / (2 * sequence)


def flops_per_token(profile: Profile) -> float:
    """Training FLOPs per token: 6 per forward multiply-add, 2 in forward and 4 in backward."""
    return 6 * sum(layer_multiply_adds(profile))
