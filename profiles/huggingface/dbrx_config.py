"""DBRX's config.json, which has its own names and two subsections, from and to Llama's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from profiles.errors import ProfileError

NORM_EPS = 1e-5  # not in the config.json
TOP = {  # Llama's name: (DBRX's, transformers' default)
    "hidden_size": ("d_model", 2048),
    "num_attention_heads": ("n_heads", 16),
    "num_hidden_layers": ("n_layers", 24),
    "max_position_embeddings": ("max_seq_len", 2048),
    "vocab_size": ("vocab_size", 32000),
    "initializer_range": ("initializer_range", 0.02),
    "tie_word_embeddings": ("tie_word_embeddings", False),
}
ATTENTION = {"num_key_value_heads": ("kv_n_heads", 1), "clip_qkv": ("clip_qkv", None)}
EXPERTS = {
    "intermediate_size": ("ffn_hidden_size", 3584),
    "num_experts": ("moe_num_experts", 4),
    "num_experts_per_tok": ("moe_top_k", 1),
}


def to_llama_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with Llama's names. Raises ProfileError for dropout and other norms of expert weights.

    The router's training noise, `moe_jitter_eps`, and the coefficient of its loss are not read: they belong to the run.
    """
    attention, experts = config.get("attn_config") or {}, config.get("ffn_config") or {}
    for name, section in (("emb_pdrop", config), ("resid_pdrop", config), ("attn_pdrop", attention)):
        if section.get(name):
            raise ProfileError(name, section[name], "is not supported for dbrx", [0.0])
    norm = experts.get("moe_normalize_expert_weights", 1.0)
    if norm not in (None, 1):
        reason = "is not supported; the weights of a token's experts sum to 1, or are not normalized"
        raise ProfileError("moe_normalize_expert_weights", norm, reason, [1.0, "null"])
    names: dict[str, Any] = {}
    for section, fields in ((config, TOP), (attention, ATTENTION), (experts, EXPERTS)):
        names |= {ours: section.get(theirs, default) for ours, (theirs, default) in fields.items()}
    parameters = config.get("rope_parameters") or {}
    names["rope_theta"] = attention.get("rope_theta", parameters.get("rope_theta", 10000.0))
    names["hidden_act"] = (experts.get("ffn_act_fn") or {}).get("name", "silu")
    names["clip_qkv"] = names["clip_qkv"] and float(names["clip_qkv"])
    return {**names, "rms_norm_eps": NORM_EPS, "norm_topk_prob": norm is not None}


def from_llama_names(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The reverse of `to_llama_names`."""
    config = {theirs: fields[ours] for ours, (theirs, _) in TOP.items()}
    attention = {theirs: fields[ours] for ours, (theirs, _) in ATTENTION.items()}
    experts = {theirs: fields[ours] for ours, (theirs, _) in EXPERTS.items()}
    experts |= {"ffn_act_fn": {"name": fields["hidden_act"]}, "moe_jitter_eps": None}
    experts["moe_normalize_expert_weights"] = 1.0 if fields["norm_topk_prob"] else None
    theta = fields["rope_theta"]
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}  # transformers 5
    return {**config, "attn_config": {**attention, "rope_theta": theta}, "ffn_config": experts}
