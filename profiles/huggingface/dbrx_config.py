"""DBRX's config.json, which has its own names and two subsections, from and to Llama's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from profiles.errors import ProfileError
from profiles.huggingface import unread_keys
from profiles.sections.families import Family

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
ALIASES = {  # other names for the same keys in transformers
    "hidden_size": "d_model",
    "num_attention_heads": "n_heads",
    "num_hidden_layers": "n_layers",
    "max_position_embeddings": "max_seq_len",
}
DROPOUTS = ("emb_pdrop", "resid_pdrop", "attn_pdrop")
# Keys that are read from the config.json, attn_config and ffn_config, besides those above. transformers 5 also writes the sizes
# num_key_value_heads and, into ffn_config, hidden_size, which it derives.
ROPE = ("rope_theta", "rope_parameters", "rope_scaling")
READ = ("attn_config", "ffn_config", "num_key_value_heads", *ROPE, *ALIASES)
READ_ATTENTION = ("rope_theta",)
READ_EXPERTS = ("ffn_act_fn", "moe_normalize_expert_weights", "hidden_size")


def to_llama_names(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The config with Llama's names. Raises ProfileError for keys and values that are not supported.

    The router's training noise, `moe_jitter_eps`, and the coefficient of its loss are not read: they belong to the run.
    """
    attention, experts = config.get("attn_config") or {}, config.get("ffn_config") or {}
    sections = (config, TOP, READ), (attention, ATTENTION, READ_ATTENTION), (experts, EXPERTS, READ_EXPERTS)
    for section, fields, others in sections:
        for name in DROPOUTS:
            if section.get(name):
                raise ProfileError(name, section[name], "is not supported for dbrx", [0.0])
        read = {*DROPOUTS, *others, *(theirs for theirs, _ in fields.values())}
        unread_keys.check(section, "dbrx", family, read)
    activation = experts.get("ffn_act_fn") or {}
    if further := activation.keys() - {"name"}:
        raise ProfileError(
            "ffn_act_fn", str(activation), f"has {min(further)}, which is not supported for dbrx"
        )
    config = unread_keys.renamed(config, ALIASES)
    norm = experts.get("moe_normalize_expert_weights", 1.0)
    if norm not in (None, 1):
        reason = "is not supported; the weights of a token's experts sum to 1, or are not normalized"
        raise ProfileError("moe_normalize_expert_weights", norm, reason, [1.0, "null"])
    names: dict[str, Any] = {}
    for section, fields in ((config, TOP), (attention, ATTENTION), (experts, EXPERTS)):
        names |= {ours: section.get(theirs, default) for ours, (theirs, default) in fields.items()}
    names |= {name: config[name] for name in ROPE if name in config}
    if theta := attention.get("rope_theta"):  # rope_parameters of transformers 5 may have its default instead
        names["rope_theta"] = theta
        parameters = names.get("rope_scaling") or names.get("rope_parameters") or {}
        names["rope_scaling"] = {**parameters, "rope_theta": theta}
    names["hidden_act"] = activation.get("name", "silu")
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
    scaling = fields["rope_scaling"] or {"rope_type": "default"}
    config["rope_parameters"] = {**scaling, "rope_theta": theta}  # transformers 5
    return {**config, "attn_config": {**attention, "rope_theta": theta}, "ffn_config": experts}
