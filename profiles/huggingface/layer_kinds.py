"""What differs between layers in a config.json, from and to `Model`'s fields: windows and RoPE.

`Model` describes patterns by numbers; a config.json lists the layers. Any other list is rejected.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from profiles.errors import ProfileError
from profiles.huggingface import unread_keys
from profiles.sections.base import Section
from profiles.sections.families import Family
from profiles.sections.model import Model
from profiles.sections.rope import LinearRope, Llama3Rope, YarnRope

# Fields that are read and written here.
FIELDS = (
    *("sliding_window", "full_attention_every", "max_window_layers", "no_rope_layer_interval"),
    *("partial_rotary_factor", "rope_theta", "rope_scaling"),
)
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
# Keys of RoPE parameters that have no effect in any kind, or only in some.
ROPE_UNUSED = {"original_max_position_embeddings", "finetuned"}

log = logging.getLogger(__name__)


def keys(family: Family) -> set[str]:
    """Keys of a config.json that `read` reads, besides `family.fields`."""
    further = {"sliding_window": "layer_types", "no_rope_layer_interval": "no_rope_layers"}
    further |= {"rope_local_base_freq": "sliding_window_pattern"}
    if "full_attention_every" not in family.fields:
        further["max_window_layers"] = "use_sliding_window"
    found = {"rope_parameters", *(key for name, key in further.items() if name in family.fields)}
    if family.linear_attention == "none":
        return found
    return found | (
        {"layer_types"}
        if family.linear_attention == "separate"
        else {"layer_types", "full_attention_interval"}
    )


def read(config: Mapping[str, Any], architecture: str, family: Family) -> dict[str, Any]:
    """Values of FIELDS, from a config with the family's defaults. Raises ProfileError for other patterns."""
    values: dict[str, Any] = {}
    if family.linear_attention != "none":
        values |= _hybrid(config, architecture, family)
    elif "full_attention_every" in family.fields:
        values |= _alternating_windows(config, architecture, family)
    elif "max_window_layers" in family.fields:
        values |= _windows_after(config, architecture)
    elif "sliding_window" in family.fields:
        values |= _equal_windows(config, architecture)
    # RoPE in all layers with full attention, or, with a base of null, in none.
    if family.linear_attention == "separate":
        given = config.get("rope_parameters") or config
        values["no_rope_layer_interval"] = 1 if given.get("rope_theta", 0) is None else None
        if values["no_rope_layer_interval"]:
            return values
    elif "no_rope_layer_interval" in family.fields:
        values["no_rope_layer_interval"] = _no_rope_layer_interval(config)
    return values | _rope(config, family)


def _equal_windows(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """sliding_window of a family whose layers all have it."""
    window, types = config.get("sliding_window"), {*(config.get("layer_types") or ())}
    if types == {FULL} and window is not None:
        reason = "layer_types: not used for %s, as in its class of transformers; sliding_window %d applies to every layer"
        log.warning(reason, architecture, window)
    elif types - {FULL, SLIDING} or (window is not None and not types <= {SLIDING}):
        raise ProfileError(
            "layer_types", ", ".join(config["layer_types"]), f"is not supported for {architecture}"
        )
    return {"sliding_window": window}


def _alternating_windows(config: Mapping[str, Any], architecture: str, family: Family) -> dict[str, Any]:
    """sliding_window, full_attention_every and max_window_layers from layer_types."""
    window, types, count = (
        config.get("sliding_window"),
        config.get("layer_types"),
        config["num_hidden_layers"],
    )
    every = config.get("sliding_window_pattern", family.defaults.get("full_attention_every"))
    types = (types or [FULL if every and i % every == 0 else SLIDING for i in range(1, count + 1)])[:count]
    if window is None or set(types) == {SLIDING}:
        return {"sliding_window": window, "full_attention_every": None}
    if set(types) == {FULL}:
        return {"sliding_window": None}
    leading = 0
    if "max_window_layers" in family.fields:
        leading = next(i for i, kind in enumerate(types) if kind != FULL)
    following = types[leading:]
    every = following.index(FULL) + 1 if FULL in following else None
    if following != [SLIDING if every is None or i % every else FULL for i in range(1, len(following) + 1)]:
        reason = f"is not a repetition of sliding_attention, with full_attention at the end of each, over {count} layers"
        raise ProfileError("layer_types", ", ".join(types), f"{reason}; not supported for {architecture}")
    return {"sliding_window": window, "full_attention_every": every, "max_window_layers": leading or None}


def _hybrid(config: Mapping[str, Any], architecture: str, family: Family) -> dict[str, Any]:
    """full_attention_every of a family with linear attention, and its sizes where they follow from others."""
    values: dict[str, Any] = {}
    if family.linear_attention == "separate":
        heads, keys = config["num_attention_heads"], config.get("linear_num_key_heads")
        size = config.get("linear_key_head_dim") or int(0.75 * config["hidden_size"] / (keys or heads))
        defaults = {
            "linear_num_key_heads": heads,
            "linear_num_value_heads": heads,
            "linear_key_head_dim": size,
            "linear_value_head_dim": 2 * size,
        }
        values = {name: default for name, default in defaults.items() if config.get(name) is None}
    return values | {"full_attention_every": _full_attention_every(config, architecture)}


def _full_attention_every(config: Mapping[str, Any], architecture: str) -> int | None:
    """From layer_types, or full_attention_interval."""
    count, types = config["num_hidden_layers"], config.get("layer_types")
    every: int | None = config.get("full_attention_interval") or config["full_attention_every"]
    if not types:
        return every
    every = types.index(FULL) + 1 if FULL in types else None
    if types != [LINEAR if every is None or i % every else FULL for i in range(1, count + 1)]:
        reason = f"is not a repetition of linear_attention, with full_attention at the end of each, over {count} layers"
        raise ProfileError("layer_types", ", ".join(types), f"{reason}; not supported for {architecture}")
    return every


def _windows_after(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """sliding_window and max_window_layers, from layer_types if there are any."""
    count, types = config["num_hidden_layers"], config.get("layer_types")
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    leading = config["max_window_layers"]
    types = types or [FULL if i < leading else SLIDING for i in range(count)]
    leading = types.index(SLIDING) if SLIDING in types else len(types)
    if types != [FULL] * leading + [SLIDING] * (len(types) - leading):
        reason = f"is not full_attention followed by sliding_attention; not supported for {architecture}"
        raise ProfileError("layer_types", ", ".join(types), reason)
    if window is None or leading >= count:
        return {"sliding_window": None, "max_window_layers": None}
    return {"sliding_window": window, "max_window_layers": leading or None}


def _no_rope_layer_interval(config: Mapping[str, Any]) -> int | None:
    """no_rope_layer_interval, from no_rope_layers if they are given: 0 for layers without RoPE, else 1."""
    rotated: list[int] | None = config.get("no_rope_layers")
    if not rotated:
        return config.get("no_rope_layer_interval")
    every = rotated.index(0) + 1 if 0 in rotated else None
    expected = [int(every is None or i % every != 0) for i in range(1, config["num_hidden_layers"] + 1)]
    if rotated != expected:
        reason = "does not leave out RoPE in every n-th layer; not supported"
        raise ProfileError("no_rope_layers", ", ".join(map(str, rotated)), reason)
    return every


def _rope(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """rope_theta, rope_scaling and partial_rotary_factor, from rope_parameters or separate keys."""
    section = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"  # as in transformers 5
    given = config.get(section) or {}
    local = config.get("rope_local_base_freq")
    if family.local_rope:
        parameters = config.get("rope_parameters") or {}
        full, local = _by_layers(parameters, config, family, local)
        given = {**full, **(config.get("rope_scaling") or {})}
    scaling = {name: value for name, value in given.items() if value is not None}
    theta = scaling.pop("rope_theta", config.get("rope_theta", 10000.0))
    kind = scaling.pop("rope_type", scaling.pop("type", "default"))
    kinds: dict[str, type[Section]] = {"linear": LinearRope, "llama3": Llama3Rope, "yarn": YarnRope}
    if kind not in ("default", *kinds):
        raise ProfileError("rope_scaling.rope_type", kind, "is not supported", ["default", *kinds])
    values: dict[str, Any] = {"rope_theta": float(theta)}
    if "rope_local_base_freq" in family.fields:
        values["rope_local_base_freq"] = float(local or theta)
    if "partial_rotary_factor" in family.fields:
        share = config.get(family.fields["partial_rotary_factor"], config.get("partial_rotary_factor"))
        share = scaling.pop("partial_rotary_factor", share)
        values["partial_rotary_factor"] = None if share == 1 else share
    known = {*kinds[kind].model_fields} if kind in kinds else set()
    for name in scaling.keys() - known - ROPE_UNUSED - {*family.unused}:
        if name not in unread_keys.DEFAULTS or scaling[name] != unread_keys.DEFAULTS[name]:
            raise ProfileError(f"{section}.{name}", scaling[name], f"is not known for rope_type {kind}")
    fields = {name: value for name, value in scaling.items() if name in known}
    return {**values, "rope_scaling": {"rope_type": kind, **fields} if known else None}


def _by_layers(
    parameters: Mapping[str, Any], config: Mapping[str, Any], family: Family, base: float | None
) -> tuple[Mapping[str, Any], float | None]:
    """The parameters of layers with full attention, and the base of those with a window.

    Args:
        base: default of that base; None: the family has one for all layers.

    Raises:
        ProfileError: the parameters of layers with a window are scaled, or their base is not supported.
    """
    section = "rope_parameters"
    if unknown := parameters.keys() - {FULL, SLIDING}:
        reason = f"is not a section for a kind of layers; give {FULL} and {SLIDING}"
        raise ProfileError(f"{section}.{min(unknown)}", str(parameters[min(unknown)]), reason)
    full = {"rope_theta": config.get("rope_theta"), **(parameters.get(FULL) or {})}
    # rope_theta beside the sections is only that of layers with full attention in transformers 5, and that of all before.
    default = family.defaults["rope_theta"] if base is None else base
    local = {"rope_theta": default, **(parameters.get(SLIDING) or {})}
    expected = {
        "rope_type": "default",
        "rope_theta": full["rope_theta"] if base is None else local["rope_theta"],
    }
    for name, value in local.items():
        if value is not None and value != expected.get(name):
            reason = "is not supported: layers with a window have unscaled RoPE with the base of the others"
            if name not in (parameters.get(SLIDING) or {}):
                reason = f"transformers' default, {reason}; set it to {expected[name]} if it is the same in all layers"
            raise ProfileError(f"{section}.{SLIDING}.{name}", str(value), reason)
    return full, local["rope_theta"]


def write(model: Model) -> dict[str, Any]:
    """The keys of a config.json for FIELDS, readable by transformers 4 and 5."""
    family, count, window = model.family, model.num_hidden_layers, model.sliding_window
    fields: dict[str, Any] = {}
    if "sliding_window" in family.fields:
        fields["sliding_window"] = window
        if {"full_attention_every", "max_window_layers"} & family.fields.keys():
            fields["layer_types"] = [SLIDING if model.window(layer) else FULL for layer in range(count)]
    if family.linear_attention != "none":
        fields["layer_types"] = [LINEAR if model.is_linear(layer) else FULL for layer in range(count)]
        if model.no_rope_layer_interval == 1:
            return {**fields, "rope_parameters": {"rope_type": "default", "rope_theta": None}}
    elif window is None and "full_attention_every" in family.fields:
        # transformers needs one, even if layer_types names no layer that has it
        fields["sliding_window"] = family.defaults["sliding_window"]
    if "max_window_layers" in family.fields and "full_attention_every" not in family.fields:
        leading = count if window is None else model.max_window_layers or 0
        fields |= {"use_sliding_window": window is not None, "max_window_layers": leading}
    if "no_rope_layer_interval" in family.fields and family.linear_attention == "none":
        fields["no_rope_layers"] = [int(model.has_rope(layer)) for layer in range(count)]
        fields["no_rope_layer_interval"] = model.no_rope_layer_interval or count + 1
    scaling = model.rope_scaling and model.rope_scaling.model_dump(exclude_none=True)
    fields |= {family.fields.get("rope_theta", "rope_theta"): model.rope_theta, "rope_scaling": scaling}
    if "partial_rotary_factor" in family.fields:
        fields[family.fields["partial_rotary_factor"]] = model.partial_rotary_factor or 1.0
    plain = {"rope_type": "default", "rope_theta": model.rope_theta}
    if family.local_rope:
        local = {**plain, "rope_theta": model.rope_local_base_freq or model.rope_theta}
        fields["rope_parameters"] = {FULL: {**plain, **(scaling or {})}, SLIDING: local}
    if model.architecture == "gpt_oss":  # transformers interprets a missing scaling as YaRN
        fields["rope_parameters"] = {**plain, **(scaling or {})}
    return fields
