"""Rules between the keys of the section `model`, by feature of its family."""

from __future__ import annotations

from typing import TYPE_CHECKING

from profiles.errors import ProfileError
from profiles.sections import families
from profiles.sections.rope import YarnRope

if TYPE_CHECKING:
    from profiles.sections.model import Model

# Required keys of latent attention, and of linear attention.
LATENT = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
LINEAR = (
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    "linear_conv_kernel_dim",
)


def check(model: Model) -> None:
    """Raise ProfileError for the first key that does not fit the others."""
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    if heads % kv_heads:
        valid = [n for n in range(1, heads + 1) if heads % n == 0]
        reason, nearest = f"does not divide {heads} query heads", neighbours(kv_heads, valid)
        raise ProfileError("num_key_value_heads", kv_heads, reason, nearest)
    family = model.family
    for name, meaning in families.OPTIONAL.items():
        if (value := getattr(model, name)) is not None and name not in family.fields:
            raise ProfileError(name, value, f"{model.architecture} has no {meaning}", ["null"])
    for name, supported in family.supported.items():
        if (value := getattr(model, name)) not in supported:
            value = getattr(value, "rope_type", value)
            reason = f"is not supported for {model.architecture}"
            choices = ["null" if each is None else each for each in supported]
            raise ProfileError(name, value, reason, choices)
    windows = () if family.linear_attention != "none" else ("full_attention_every", "max_window_layers")
    for name in windows:
        if (value := getattr(model, name)) is not None and model.sliding_window is None:
            reason = "is set, but sliding_window, which the other layers need, is not"
            raise ProfileError(name, value, reason, ["null"])
    if family.qkv_by_head and kv_heads != heads:
        reason = f"{model.architecture} has a KV head for each query head"
        raise ProfileError("num_key_value_heads", kv_heads, reason, [heads])
    if not family.free_head_dim and model.head_dim * heads != model.hidden_size:
        reason = f"{model.architecture} needs {heads} heads · head_dim = hidden_size {model.hidden_size}"
        raise ProfileError("head_dim", model.head_dim, reason, [model.hidden_size // heads])
    _check_experts(model)
    _check_groups(model)
    _check_latents(model)
    _check_linear(model)
    _check_parametrization(model)
    if not family.rotary:
        if kv_heads != heads:
            reason = "gpt has a KV head for each query head"
            raise ProfileError("num_key_value_heads", kv_heads, reason, [heads])
        return
    for name in ("dropout", "mlp_dropout"):
        if rate := getattr(model, name):
            raise ProfileError(name, rate, f"{model.architecture} has no dropout", [0.0])
    name = "head_dim" if model.qk_rope_head_dim is None else "qk_rope_head_dim"
    size = model.rotary_dim
    if model.partial_rotary_factor is not None and (size % 2 or not size):
        reason = f"rotates {size} elements of a head; RoPE rotates pairs, so they must be even"
        raise ProfileError("partial_rotary_factor", model.partial_rotary_factor, reason, ["null"])
    if size % 2:
        reason = "RoPE rotates pairs, so it must be even"
        raise ProfileError(name, size, reason, [size - 1 or 2, size + 1])


def _check_parametrization(model: Model) -> None:
    kind = model.parametrization
    bases = {"base_hidden_size": kind != "standard", "base_num_hidden_layers": kind == "completep"}
    for name, needed in bases.items():
        given = getattr(model, name)
        if needed and given is None:
            size = getattr(model, name.removeprefix("base_"))
            reason = f"is missing; parametrization {kind} is relative to a base model"
            raise ProfileError(name, None, reason, [size])
        if given is not None and not needed:
            raise ProfileError(name, given, f"has no effect with parametrization {kind}", ["null"])
    if kind == "standard":
        return
    if not model.family.parametrized:
        known = [name for name, family in families.OWN.items() if family.parametrized]
        reason = f"is not supported for {model.architecture}; its scales are known for {', '.join(known)}"
        raise ProfileError("parametrization", kind, reason, ["standard"])
    for name in ("attention_bias", "mlp_bias"):
        if getattr(model, name):
            raise ProfileError(name, True, f"is not supported with parametrization {kind}", [False])


def _check_latents(model: Model) -> None:
    kind, scaling = model.architecture, model.rope_scaling
    if model.family.local_rope and isinstance(scaling, YarnRope) and not scaling.truncate:
        reason = f"transformers always rounds the bounds for {kind}"
        raise ProfileError("rope_scaling.truncate", False, reason, [True])
    if kind != "deepseek_v3":
        if isinstance(scaling, YarnRope):
            for name in ("mscale", "mscale_all_dim"):
                if (value := getattr(scaling, name)) is not None:
                    raise ProfileError(f"rope_scaling.{name}", value, f"{kind} has none", ["null"])
        return
    for name in LATENT:
        if getattr(model, name) is None:
            raise ProfileError(name, None, f"is missing; {kind} needs it", [])
    heads = model.num_attention_heads
    _, plain, rotated, width = (getattr(model, name) for name in LATENT)
    size = plain + rotated
    if model.num_key_value_heads != heads:
        reason = f"{kind} has keys and values for each query head"
        raise ProfileError("num_key_value_heads", model.num_key_value_heads, reason, [heads])
    if model.head_dim != size:
        reason = "is not qk_nope_head_dim + qk_rope_head_dim"
        raise ProfileError("head_dim", model.head_dim, reason, [size])
    if width > size:
        reason = f"is more than the {size} elements of a query; not supported"
        raise ProfileError("v_head_dim", width, reason, [size])


def _check_groups(model: Model) -> None:
    if "n_group" not in model.family.fields:
        return
    if model.n_shared_experts is None:
        reason = f"is missing; {model.architecture} needs it"
        raise ProfileError("n_shared_experts", None, reason, [1])
    if (dense := model.first_k_dense_replace or 0) >= (layers := model.num_hidden_layers):
        reason = f"leaves none of {layers} layers with experts"
        raise ProfileError("first_k_dense_replace", dense, reason, [layers - 1])
    experts, groups, chosen = model.num_experts or 1, model.n_group or 1, model.topk_group or 1
    valid = [n for n in range(1, experts // 2 + 1) if experts % n == 0]
    if groups not in valid:
        reason = f"does not divide {experts} experts into groups of two or more"
        raise ProfileError("n_group", groups, reason, neighbours(groups, valid))
    fewest = -(-(model.num_experts_per_tok or 1) * groups // experts)  # groups that hold a token's experts
    if not fewest <= chosen <= groups:
        reason = f"is not between {fewest}, which hold num_experts_per_tok {model.num_experts_per_tok}, and n_group {groups}"
        raise ProfileError("topk_group", chosen, reason, [fewest if chosen < fewest else groups])


def _check_linear(model: Model) -> None:
    if model.family.linear_attention == "none":
        return
    for name in LINEAR:
        if getattr(model, name) is None:
            raise ProfileError(name, None, f"is missing; {model.architecture} has linear attention", [])
    heads, values = model.linear_num_key_heads or 1, model.linear_num_value_heads or 1
    if values % heads:
        reason = f"is not a multiple of linear_num_key_heads {heads}"
        below = values // heads * heads
        raise ProfileError("linear_num_value_heads", values, reason, [n for n in (below, below + heads) if n])
    layers, linear = model.num_hidden_layers, model.num_linear_layers
    if linear in (0, layers):  # transformers generates only from models with both
        reason = f"leaves no layer with {'full' if linear else 'linear'} attention"
        choices = [min(4, layers)] if layers > 1 else []
        raise ProfileError("full_attention_every", model.full_attention_every, reason, choices)
    if (every := model.no_rope_layer_interval) not in (None, 1):
        reason = f"is not supported for {model.architecture}: its layers with full attention all have RoPE, or none has"
        raise ProfileError("no_rope_layer_interval", every, reason, ["null", 1])


def _check_experts(model: Model) -> None:
    kind, experts, chosen = model.architecture, model.num_experts, model.num_experts_per_tok
    fields = model.family.fields
    if "num_experts" not in fields:
        return
    if experts is None or chosen is None:
        name = "num_experts" if experts is None else "num_experts_per_tok"
        raise ProfileError(name, None, f"is missing; {kind} has experts", [8 if experts is None else 2])
    if chosen > experts:
        reason = f"is more than num_experts {experts}"
        raise ProfileError("num_experts_per_tok", chosen, reason, [experts])
    if "norm_topk_prob" not in fields and not model.norm_topk_prob:
        raise ProfileError("norm_topk_prob", False, f"{kind}'s weights sum to 1", [True])
    if "moe_intermediate_size" in fields and model.moe_intermediate_size is None:
        reason = f"is missing; it is the width of {kind}'s experts"
        raise ProfileError("moe_intermediate_size", None, reason, [model.intermediate_size])
    if "shared_expert_intermediate_size" in fields and model.shared_expert_intermediate_size is None:
        reason = f"is missing; {kind} has a shared expert"
        raise ProfileError("shared_expert_intermediate_size", None, reason, [model.expert_width])


def neighbours(value: int, valid: list[int]) -> list[int]:
    """The nearest valid values below and above an invalid one, if there are any."""
    return [n for n in valid if 0 < n < value][-1:] + [n for n in valid if n > value][:1]
