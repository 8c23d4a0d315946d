"""Settings of a model that the shapes of its weights do not show."""

from __future__ import annotations

from collections.abc import Sequence

from profiles.sections.model import Model

# Settings with which weights of the same shapes belong to another model: a difference is an error.
STRUCTURE = (
    *("num_attention_heads", "num_key_value_heads", "head_dim", "qk_nope_head_dim", "qk_rope_head_dim"),
    *("v_head_dim", "tie_word_embeddings", "linear_num_key_heads", "linear_num_value_heads"),
    *("linear_key_head_dim", "linear_value_head_dim"),
)
# Other settings that cannot be inferred from weights. A run may change them, for example for a longer context: a warning.
NOT_IN_WEIGHTS = (
    *("hidden_act", "norm_eps", "rope_theta", "rope_scaling", "sliding_window", "full_attention_every"),
    *("max_window_layers", "no_rope_layer_interval", "partial_rotary_factor", "embedding_multiplier"),
    *("attention_multiplier", "residual_multiplier", "logits_scaling", "query_pre_attn_scalar"),
    *("rope_local_base_freq", "use_parallel_residual", "attn_logit_softcapping", "final_logit_softcapping"),
    *("clip_qkv", "num_experts_per_tok", "norm_topk_prob", "n_group", "topk_group", "routed_scaling_factor"),
    "linear_allow_neg_eigval",
)


def differences(names: Sequence[str], one: Model, other: Model, here: str, there: str) -> list[str]:
    """A clause for each of these settings that differs.

    Args:
        here, there: where the settings of `one` and `other` are, for the clauses.
    """
    pairs = [(name, getattr(one, name), getattr(other, name)) for name in names]
    unequal = [pair for pair in pairs if pair[1] != pair[2]]
    return [f"model.{name} is {ours} {here}, {theirs} {there}" for name, ours, theirs in unequal]
