"""Conversion of Hugging Face config.json files from and to `Model`'s fields.

Supports LlamaForCausalLM, MistralForCausalLM, Qwen3ForCausalLM, Olmo2ForCausalLM, MixtralForCausalLM, Qwen3MoeForCausalLM,
DbrxForCausalLM (dbrx_config.py), GptOssForCausalLM, DeepseekV3ForCausalLM and GPT2LMHeadModel. DeepSeek-V3's multi-token
prediction modules are left out: num_nextn_predict_layers is not read, and written as 0.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from profiles import yaml_text
from profiles.errors import ProfileError
from profiles.huggingface import config_keys, dbrx_config
from profiles.sections import families
from profiles.sections.base import Section
from profiles.sections.model import Model
from profiles.sections.rope import LinearRope, Llama3Rope, YarnRope

MAX_BYTES = 16_000_000  # of a config.json; those of quantized models list their layers
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
WINDOWS = {"sliding_window", "full_attention_every"}  # fields that follow from layer_types
GPT_DROPOUTS = ("embd_pdrop", "attn_pdrop", "resid_pdrop")
# Defaults of transformers for fields that a config.json omits.
GPT_DEFAULTS: dict[str, Any] = {"activation_function": "gelu_new", **dict.fromkeys(GPT_DROPOUTS, 0.1)}
GPT_OSS_WINDOW = 128  # transformers needs a window, even if layer_types names no layer that has one
GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
# Keys of RoPE parameters that have no effect in any kind, or only in some.
ROPE_UNUSED = {"original_max_position_embeddings", "finetuned"}

log = logging.getLogger(__name__)


def read_config_json(path: Path, key: str, value: str | None = None) -> dict[str, Any]:
    """`Model` fields from a config.json, given as the file or its folder.

    Args:
        key: profile key or option that names it, with `value`; None: the path.

    Raises:
        ProfileError: the file is missing, cannot be read, or describes a model that is not supported.
    """
    value = str(path) if value is None else value
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(yaml_text.read_bytes(path, MAX_BYTES))
        if not isinstance(config, dict):
            raise ValueError("it is not a JSON object")
    except FileNotFoundError:
        raise ProfileError(key, value, f"there is no file {path}") from None
    except (ValueError, OSError, RecursionError) as error:
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
        config_keys.check(config, architecture, family, _read_keys(family))
    if architecture == "gpt_oss" and not (config.get("rope_parameters") or config.get("rope_scaling")):
        config = {**config, "rope_scaling": GPT_OSS_ROPE}
    config = {**family.defaults, **config_keys.renamed(config, dict.fromkeys(EXPERT_ALIASES, "num_experts"))}
    values |= {name: config[name] for name in LLAMA_FIELDS if config.get(name) is not None}
    for ours, theirs in family.fields.items():
        name = theirs if theirs in config else ours
        if ours not in WINDOWS and name in config:
            values[ours] = config[name]
    if architecture == "deepseek_v3":
        values.pop("head_dim", None)  # of the rotated elements alone
    values["norm_eps"] = config["rms_norm_eps"]
    if "sliding_window" in family.fields:
        values |= _windows(config, architecture)
    return values | _rope(config)


def _read_keys(family: families.Family) -> set[str]:
    """Keys that are read from the config.json of a family with RoPE and Llama's names."""
    keys = {*LLAMA_FIELDS, "rms_norm_eps", "rope_parameters", *family.fixed, *family.fields.values()}
    if "num_experts" in family.fields:
        keys |= {*EXPERT_ALIASES}
    return keys | {"layer_types"} if "sliding_window" in family.fields else keys


def _gpt(config: Mapping[str, Any], family: families.Family) -> dict[str, Any]:
    """Fields from GPT-2's config.json."""
    read = {*GPT_FIELDS.values(), *GPT_ALIASES, *GPT_DROPOUTS, *family.fixed}
    config_keys.check(config, "gpt", family, read)
    config = GPT_DEFAULTS | config_keys.renamed(config, GPT_ALIASES)
    values = {ours: config[theirs] for ours, theirs in GPT_FIELDS.items() if config.get(theirs) is not None}
    if "hidden_size" in values:
        values.setdefault("intermediate_size", 4 * values["hidden_size"])
    dropouts = {config[name] for name in GPT_DROPOUTS}
    if len(dropouts) > 1:
        raise ProfileError(
            "embd_pdrop", config["embd_pdrop"], "attn_pdrop and resid_pdrop must be equal to it"
        )
    return values | {"dropout": float(dropouts.pop())}


def _windows(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """sliding_window and full_attention_every from layer_types."""
    window, types = config.get("sliding_window"), config.get("layer_types")
    if architecture != "gpt_oss" and types and set(types) == {"full_attention"}:
        if window is not None:
            reason = (
                "layer_types: not used for %s, as in transformers; sliding_window %d applies to every layer"
            )
            log.warning(reason, architecture, window)
        return {"sliding_window": window}
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
    """rope_theta and rope_scaling, from rope_parameters (transformers 5) or separate fields (version 4)."""
    section = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"  # as in transformers 5
    scaling = {name: value for name, value in (config.get(section) or {}).items() if value is not None}
    theta = scaling.pop("rope_theta", config.get("rope_theta", 10000.0))
    kind = scaling.pop("rope_type", scaling.pop("type", "default"))
    kinds: dict[str, type[Section]] = {"linear": LinearRope, "llama3": Llama3Rope, "yarn": YarnRope}
    if kind not in ("default", *kinds):
        raise ProfileError("rope_scaling.rope_type", kind, "is not supported", ["default", *kinds])
    known = {*kinds[kind].model_fields} if kind in kinds else set()
    for name in scaling.keys() - known - ROPE_UNUSED:
        if name not in config_keys.DEFAULTS or scaling[name] != config_keys.DEFAULTS[name]:
            raise ProfileError(f"{section}.{name}", scaling[name], f"is not known for rope_type {kind}")
    fields = {name: value for name, value in scaling.items() if name in known}
    return {"rope_theta": float(theta), "rope_scaling": {"rope_type": kind, **fields} if known else None}


def to_config_json(model: Model) -> dict[str, Any]:
    """The config.json of a model, without TOKEN_IDS, readable by transformers 4 and 5."""
    kind, family = model.architecture, model.family
    if family.rotary:
        fields = {name: getattr(model, name) for name in LLAMA_FIELDS}
        scaling = model.rope_scaling and model.rope_scaling.model_dump(exclude_none=True)
        fields |= {"rms_norm_eps": model.norm_eps, "rope_scaling": scaling}
        if kind == "gpt_oss":
            # transformers interprets a missing scaling as YaRN.
            scaling = scaling or {"rope_type": "default"}
            fields["rope_parameters"] = {**scaling, "rope_theta": model.rope_theta}
            windows = map(model.window, range(model.num_hidden_layers))
            fields["layer_types"] = [f"{'sliding' if window else 'full'}_attention" for window in windows]
        own = {ours: theirs for ours, theirs in family.fields.items() if ours != "full_attention_every"}
        fields |= {theirs: getattr(model, ours) for ours, theirs in own.items()}
        if kind == "gpt_oss" and model.sliding_window is None:
            fields["sliding_window"] = GPT_OSS_WINDOW
        if kind == "deepseek_v3":
            del fields["head_dim"]
            fields["num_nextn_predict_layers"] = 0
        if kind == "dbrx":
            fields = dbrx_config.from_llama_names(fields)
    else:
        fields = {theirs: getattr(model, ours) for ours, theirs in GPT_FIELDS.items()}
        fields |= dict.fromkeys(GPT_DROPOUTS, model.dropout)
    names = {"architectures": [family.huggingface], "model_type": family.model_type or kind}
    return {**names, **fields, **family.fixed}
