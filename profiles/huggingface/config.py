"""The config.json of Hugging Face's models from and to `Model`'s fields.

Of LlamaForCausalLM, MistralForCausalLM, Qwen3ForCausalLM, Olmo2ForCausalLM, MixtralForCausalLM, Qwen3MoeForCausalLM,
DbrxForCausalLM (dbrx_config.py), GptOssForCausalLM, DeepseekV3ForCausalLM and GPT2LMHeadModel. Of DeepSeek-V3, the modules that
predict further tokens are left out: num_nextn_predict_layers is not read, and written as 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from profiles.errors import ProfileError
from profiles.huggingface import dbrx_config
from profiles.sections.model import LATENT, ROTARY, WINDOWED, Model
from profiles.sections.rope import LinearRope, Llama3Rope, YarnRope

LLAMA_FIELDS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "max_position_embeddings", "rope_theta", "rope_scaling"),
    *("tie_word_embeddings", "attention_bias", "mlp_bias", "hidden_act", "initializer_range"),
)
GPT_FIELDS = {  # our name: name in GPT-2's config.json
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "hidden_act": "activation_function",
    "norm_eps": "layer_norm_epsilon",
    "vocab_size": "vocab_size",
    "initializer_range": "initializer_range",
    "tie_word_embeddings": "tie_word_embeddings",
}
GPT_DROPOUTS = ("embd_pdrop", "attn_pdrop", "resid_pdrop")
# Fields that change the model but support one value only, which is transformers' default.
FIXED = {
    "llama": {"attention_dropout": 0.0},
    "mistral": {"attention_dropout": 0.0},
    "qwen3": {"attention_dropout": 0.0, "use_sliding_window": False},
    "olmo2": {"attention_dropout": 0.0},
    "mixtral": {"attention_dropout": 0.0, "router_jitter_noise": 0.0},
    "qwen3_moe": {
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
    },
    "dbrx": {},
    "gpt_oss": {"attention_dropout": 0.0, "swiglu_limit": 7.0, "swiglu_alpha": 1.702},
    "deepseek_v3": {
        "attention_dropout": 0.0,
        "attention_bias": False,
        "rope_interleave": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
    },
    "gpt": {
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
}
# Defaults of transformers for fields that a config.json omits.
GPT_DEFAULTS = {"activation_function": "gelu_new", **dict.fromkeys(GPT_DROPOUTS, 0.1)}
ROTARY_DEFAULTS = {
    "llama": {"rms_norm_eps": 1e-6},
    "mistral": {"rms_norm_eps": 1e-6, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen3": {"rms_norm_eps": 1e-6, "head_dim": 128},
    "olmo2": {"rms_norm_eps": 1e-5},
    "mixtral": {
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": None,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen3_moe": {
        "rms_norm_eps": 1e-6,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
    },
    "dbrx": {},
    "gpt_oss": {
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "num_experts": 128,
        "num_experts_per_tok": 4,
        "attention_bias": True,
    },
    "deepseek_v3": {
        "rms_norm_eps": 1e-6,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "norm_topk_prob": True,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
    },
}
GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
# Fields of the experts: our name: name in config.json.
EXPERT_FIELDS = {
    "mixtral": {"num_experts": "num_local_experts", "num_experts_per_tok": "num_experts_per_tok"},
    "qwen3_moe": {
        name: name
        for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
    },
    "dbrx": {name: name for name in ("num_experts", "num_experts_per_tok", "norm_topk_prob")},
    "gpt_oss": {"num_experts": "num_local_experts", "num_experts_per_tok": "num_experts_per_tok"},
    "deepseek_v3": {
        "num_experts": "n_routed_experts",
        **{name: name for name in ("num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")},
        **{name: name for name in ("n_shared_experts", "first_k_dense_replace", "n_group", "topk_group")},
        **{name: name for name in ("routed_scaling_factor", "q_lora_rank", *LATENT)},
    },
}
CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "dbrx": "DbrxForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}


def from_config_json(config: Mapping[str, Any]) -> dict[str, Any]:
    """`Model` fields from a Hugging Face config.json. Raises ProfileError for an unsupported architecture or feature."""
    kind = config.get("model_type")
    architectures = {**{name: name for name in ROTARY}, "gpt2": "gpt"}
    if kind not in architectures:
        raise ProfileError("model_type", kind, "is not a supported architecture", architectures)
    architecture = architectures[kind]
    for name, value in FIXED[architecture].items():
        if config.get(name, value) != value:
            raise ProfileError(name, config[name], f"is not supported for {architecture}", [value])
    values: dict[str, Any] = {"architecture": architecture}
    if architecture in ROTARY:
        config = dbrx_config.to_llama_names(config) if architecture == "dbrx" else config
        if architecture == "gpt_oss" and not (config.get("rope_parameters") or config.get("rope_scaling")):
            config = {**config, "rope_scaling": GPT_OSS_ROPE}
        config = ROTARY_DEFAULTS[architecture] | _canonical_experts(config)
        values |= {name: config[name] for name in LLAMA_FIELDS if config.get(name) is not None}
        values |= {name: config[name] for name in EXPERT_FIELDS.get(architecture, ())}
        if architecture == "deepseek_v3":
            values.pop("head_dim", None)  # of the rotated elements alone
        values["norm_eps"] = config["rms_norm_eps"]
        if architecture == "dbrx":
            values["clip_qkv"] = config["clip_qkv"]
        if architecture in WINDOWED:
            values |= _windows(config, architecture)
        return values | _rope(config)
    config = GPT_DEFAULTS | dict(config)
    values |= {ours: config[theirs] for ours, theirs in GPT_FIELDS.items() if config.get(theirs) is not None}
    if "hidden_size" in values:
        values.setdefault("intermediate_size", 4 * values["hidden_size"])
    dropouts = {config[name] for name in GPT_DROPOUTS}
    if len(dropouts) > 1:
        raise ProfileError(
            "embd_pdrop", config["embd_pdrop"], "attn_pdrop and resid_pdrop must be equal to it"
        )
    return values | {"dropout": float(dropouts.pop())}


def _canonical_experts(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the number of experts under one name: transformers has three."""
    names = dict.fromkeys(("num_local_experts", "n_routed_experts"), "num_experts")
    return {names.get(name, name): value for name, value in config.items()}


def _windows(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """sliding_window and full_attention_every from the types of the layers."""
    window, types = config["sliding_window"], config.get("layer_types")
    full = {"full_attention_every": None}
    if architecture == "gpt_oss":
        types = types or ["sliding_attention", "full_attention"] * config["num_hidden_layers"]
        types = types[: config["num_hidden_layers"]]
    if window is None or not types or set(types) == {"sliding_attention"}:
        return {"sliding_window": window, **(full if architecture == "gpt_oss" else {})}
    if set(types) == {"full_attention"}:
        return {"sliding_window": None}
    every = types.index("full_attention") + 1
    expected = ["sliding_attention"] * (every - 1) + ["full_attention"]
    if architecture != "gpt_oss" or types != [expected[layer % every] for layer in range(len(types))]:
        reason = f"is not supported for {architecture}"
        if architecture == "gpt_oss":
            reason = "is not a repetition of sliding_attention, with full_attention at the end of each"
        raise ProfileError("layer_types", ", ".join(types), reason)
    return {"sliding_window": window, "full_attention_every": every}


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """rope_theta and rope_scaling, from rope_parameters (transformers 5) or from separate fields (transformers 4)."""
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = scaling.pop("rope_theta", config.get("rope_theta", 10000.0))
    kind = scaling.pop("rope_type", scaling.pop("type", "default"))
    kinds = {"linear": LinearRope, "llama3": Llama3Rope, "yarn": YarnRope}
    if kind == "default":
        return {"rope_theta": float(theta), "rope_scaling": None}
    if kind not in kinds:
        raise ProfileError("rope_scaling.rope_type", kind, "is not supported", ["default", *kinds])
    fields = {name: value for name, value in scaling.items() if name in kinds[kind].model_fields}
    return {"rope_theta": float(theta), "rope_scaling": {"rope_type": kind, **fields}}


def to_config_json(model: Model) -> dict[str, Any]:
    """The config.json of a model, readable by transformers 4 and 5."""
    if (kind := model.architecture) in ROTARY:
        fields = {name: getattr(model, name) for name in LLAMA_FIELDS}
        scaling = model.rope_scaling and model.rope_scaling.model_dump(exclude_none=True)
        fields |= {"rms_norm_eps": model.norm_eps, "rope_scaling": scaling}
        if kind in WINDOWED:
            fields["sliding_window"] = model.sliding_window
        if kind == "gpt_oss":
            # transformers takes the absence of a scaling as YaRN.
            scaling = scaling or {"rope_type": "default"}
            fields["rope_parameters"] = {**scaling, "rope_theta": model.rope_theta}
            windows = map(model.window, range(model.num_hidden_layers))
            fields["layer_types"] = [f"{'sliding' if window else 'full'}_attention" for window in windows]
        fields |= {theirs: getattr(model, ours) for ours, theirs in EXPERT_FIELDS.get(kind, {}).items()}
        if kind == "deepseek_v3":
            del fields["head_dim"]
            fields["num_nextn_predict_layers"] = 0
        if kind == "dbrx":
            fields = dbrx_config.from_llama_names({**fields, "clip_qkv": model.clip_qkv})
        return {"architectures": [CLASSES[kind]], "model_type": kind, **fields, **FIXED[kind]}
    fields = {theirs: getattr(model, ours) for ours, theirs in GPT_FIELDS.items()}
    dropouts = dict.fromkeys(GPT_DROPOUTS, model.dropout)
    return {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", **fields, **dropouts, **FIXED["gpt"]}
