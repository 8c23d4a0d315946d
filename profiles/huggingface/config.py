"""Conversion of Hugging Face config.json files from and to `Model`'s fields.

Supports the classes in the table of families (profiles/sections/families.py); DBRX's names are in dbrx_config.py, and which
layers have which attention and RoPE in layer_kinds.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from profiles.errors import ProfileError
from profiles.files import state_files, yaml_text
from profiles.huggingface import dbrx_config, layer_kinds, unread_keys
from profiles.sections import families
from profiles.sections.model import Model

MAX_BYTES = 16_000_000  # of a config.json; those of quantized models list their layers
LLAMA_FIELDS = (  # whose names in Llama's config.json are ours
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "max_position_embeddings", "rope_theta", "rope_scaling"),
    *("tie_word_embeddings", "attention_bias", "mlp_bias", "hidden_act", "initializer_range"),
)
MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "logits_scaling")  # 1 in a config.json without
NORM_EPS = "rms_norm_eps"  # in Llama's config.json
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
    # Not keys of transformers, whose GPT-2 always has biases: it ignores them and sets missing biases to zero.
    "attention_bias": "attention_bias",
    "mlp_bias": "mlp_bias",
}
GPT_ALIASES = {  # other names for the same keys in transformers
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
EXPERT_ALIASES = ("num_experts", "num_local_experts", "n_routed_experts")
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")  # keys that belong to the tokenizer
GENERATION_CONFIG = "generation_config.json"  # its token ids take precedence in transformers and vLLM
GPT_DROPOUTS = ("embd_pdrop", "attn_pdrop", "resid_pdrop")
# Defaults of transformers for fields that a config.json omits.
GPT_DEFAULTS: dict[str, Any] = {"activation_function": "gelu_new", **dict.fromkeys(GPT_DROPOUTS, 0.1)}
GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def read_config_json(path: Path, key: str, value: str | None = None) -> dict[str, Any]:
    """`Model` fields from a config.json, given as the file or its folder.

    Args:
        key: profile key or option that names it, with `value`; None: the path.

    Raises:
        ProfileError: the file is missing, cannot be read, or describes a model that is not supported.
    """
    value = str(path) if value is None else value
    path = path / "config.json" if state_files.is_dir(path) else path
    try:
        config = json.loads(yaml_text.read_bytes(path, MAX_BYTES))
        if not isinstance(config, dict):
            raise ValueError("it is not a JSON object")
    except FileNotFoundError:
        raise ProfileError(key, value, f"there is no file {path}") from None
    except (ValueError, RecursionError) as error:
        raise ProfileError(key, value, f"cannot be read: {error}") from error
    try:
        return from_config_json(config)
    except ProfileError as error:
        raise ProfileError(key, value, f"cannot be used: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        # A key is missing, or its value has a wrong type.
        raise ProfileError(key, value, f"cannot be used: {error!r}") from error


def from_config_json(config: Mapping[str, Any]) -> dict[str, Any]:
    """`Model` fields from a config.json. Raises ProfileError for an unsupported architecture or feature."""
    if config.get("model_type") == "mistral" and config.get("layer_types"):
        config = _ministral(config)
    kind = config.get("model_type")
    architectures = {family.model_type or name: name for name, family in families.OWN.items()}
    if kind not in architectures:  # packages are imported only if needed
        architectures |= {families.find(name).model_type or name: name for name in families.names()}
    if kind not in architectures:
        raise ProfileError("model_type", kind, "is not a supported architecture", [*architectures])
    architecture = architectures[kind]
    family = families.find(architecture)
    for name, value in family.fixed.items():
        if config.get(name, value) != value:
            raise ProfileError(name, config[name], f"is not supported for {architecture}", [value])
    values: dict[str, Any] = {"architecture": architecture}
    if not family.rotary:
        return values | _gpt(config, family)
    if architecture == "dbrx":
        config = dbrx_config.to_llama_names(config, family)
    else:
        unread_keys.check(config, architecture, family, _read_keys(family))
    if architecture == "gpt_oss" and config.get("rope_parameters") is None and not config.get("rope_scaling"):
        config = {**config, "rope_scaling": GPT_OSS_ROPE}
    given = unread_keys.renamed(config, dict.fromkeys(EXPERT_ALIASES, "num_experts"))
    given = unread_keys.renamed(given, {family.fields.get(name, name): name for name in LLAMA_FIELDS})
    config = {**family.defaults, **given}
    values |= {name: config[name] for name in LLAMA_FIELDS if config.get(name) is not None}
    further = {NORM_EPS: "norm_eps", **{theirs: ours for ours, theirs in family.fields.items()}}
    for theirs, ours in further.items():
        name = theirs if theirs in config else ours
        if ours not in (*LLAMA_FIELDS, *layer_kinds.FIELDS) and name in config:
            values[ours] = config[name]
    if architecture == "deepseek_v3":  # whose head_dim is that of the rotated elements alone
        size, rotated = values.pop("head_dim", None), values["qk_rope_head_dim"]
        if size not in (None, rotated):
            raise ProfileError("head_dim", size, "is not qk_rope_head_dim, as in transformers", [rotated])
    return values | layer_kinds.read(config, architecture, family)


def _ministral(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json of Mistral with kinds of layers as Ministral's, as transformers reads it."""
    names = config.get("architectures") or ()
    names = [names] if isinstance(names, str) else names
    classes = [name.replace("Mistral", "Ministral") for name in names]
    return {**config, "model_type": "ministral", "architectures": classes}


def _read_keys(family: families.Family) -> set[str]:
    """Keys that are read from the config.json of a family with RoPE and Llama's names."""
    names = {**{name: name for name in LLAMA_FIELDS}, "norm_eps": NORM_EPS, **family.fields}
    keys = {*names.values(), *family.fixed}
    if "full_attention_every" in family.fields:
        keys -= {"full_attention_every", "max_window_layers"}  # which layer_types has
    if "num_experts" in family.fields:
        keys |= {*EXPERT_ALIASES}
    return keys | layer_kinds.keys(family)


def _gpt(config: Mapping[str, Any], family: families.Family) -> dict[str, Any]:
    """Fields from GPT-2's config.json."""
    read = {*GPT_FIELDS.values(), *GPT_ALIASES, *GPT_DROPOUTS, *family.fixed}
    unread_keys.check(config, "gpt", family, read)
    config = GPT_DEFAULTS | unread_keys.renamed(config, GPT_ALIASES)
    values = {ours: config[theirs] for ours, theirs in GPT_FIELDS.items() if config.get(theirs) is not None}
    if "hidden_size" in values:
        values.setdefault("intermediate_size", 4 * values["hidden_size"])
    dropouts = {config[name] for name in GPT_DROPOUTS}
    if len(dropouts) > 1:
        raise ProfileError(
            "embd_pdrop", config["embd_pdrop"], "attn_pdrop and resid_pdrop must be equal to it"
        )
    return values | {"dropout": float(dropouts.pop())}


def to_config_json(model: Model) -> dict[str, Any]:
    """The config.json of a model, without TOKEN_IDS, readable by transformers 4 and 5."""
    kind, family = model.architecture, model.family
    if family.rotary:
        names = {**dict(zip(LLAMA_FIELDS, LLAMA_FIELDS, strict=True)), "norm_eps": NORM_EPS, **family.fields}
        neutral = {"attention_multiplier": model.head_dim**-0.5, **dict.fromkeys(MULTIPLIERS, 1.0)}
        neutral |= {"query_pre_attn_scalar": model.head_dim, "rope_local_base_freq": model.rope_theta}
        neutral["num_nextn_predict_layers"] = 0  # if omitted, transformers' default of 1 would apply
        fields = {}
        for ours, theirs in names.items():
            if ours not in layer_kinds.FIELDS:
                value = getattr(model, ours)
                fields[theirs] = neutral.get(ours) if value is None else value
        fields |= layer_kinds.write(model)
        if kind == "deepseek_v3":
            del fields["head_dim"]
        if kind == "qwen3_5":  # vLLM's name
            fields["mtp_num_hidden_layers"] = fields["num_nextn_predict_layers"]
        if kind == "dbrx":
            fields = dbrx_config.from_llama_names(fields)
    else:
        fields = {theirs: getattr(model, ours) for ours, theirs in GPT_FIELDS.items()}
        fields |= dict.fromkeys(GPT_DROPOUTS, model.dropout)
    classes = {"architectures": [family.huggingface], "model_type": family.model_type or kind}
    return {**classes, **fields, **family.fixed}
