"""Analytic FLOP count of a model: the definition behind MFU and pipeline balance.

Counts what the mathematics needs: no recomputation, padding, norms or element-wise work. What a rank really
multiplies is counted operator by operator (modeling/planning/operator_costs.py).
"""

from __future__ import annotations

from profiles.schema import Profile


def layer_multiply_adds(profile: Profile) -> list[int]:
    """Forward multiply-adds per token of each layer; the last includes the language-model head.

    Per layer: h·d·(2n + 2k) of the attention projections, 3·h·f (gated) or 2·h·f (gpt) of the MLP, and s·n·d of causal
    attention, half of its two s×s products.
    """
    model, s = profile.model, profile.train.sequence_length
    h, d = model.hidden_size, model.head_dim
    projections = h * d * (2 * model.num_attention_heads + 2 * model.num_key_value_heads)
    matrices = 2 if model.architecture == "gpt" else 3  # gate, up, down
    layer = projections + matrices * h * model.intermediate_size + s * model.num_attention_heads * d
    return [layer] * (model.num_hidden_layers - 1) + [layer + model.vocab_size * h]


def flops_per_token(profile: Profile) -> float:
    """Training FLOPs per token: 6 per forward multiply-add, 2 in forward and 4 in backward."""
    return 6 * sum(layer_multiply_adds(profile))
