"""A model family: the features in which an architecture differs from Llama."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from profiles.sections.model import Model

# Fields that only some families have, and the feature that each belongs to.
OPTIONAL = {
    "sliding_window": "sliding window",
    **dict.fromkeys(("full_attention_every", "max_window_layers"), "layers of different windows"),
    "no_rope_layer_interval": "layers without RoPE",
    "partial_rotary_factor": "partly rotated heads",
    "rope_local_base_freq": "RoPE of another base in layers with a window",
    "query_pre_attn_scalar": "scale of queries",
    "attn_logit_softcapping": "soft cap of attention scores",
    "final_logit_softcapping": "soft cap of logits",
    **dict.fromkeys(
        ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"),
        "multipliers",
    ),
    "clip_qkv": "clipped heads",
    "use_parallel_residual": "attention and MLP side by side",
    "use_qk_norm": "choice of norms of heads",
    **dict.fromkeys(("num_experts", "num_experts_per_tok", "moe_intermediate_size"), "experts"),
    "n_shared_experts": "shared experts",
    "shared_expert_intermediate_size": "gated shared expert",
    **dict.fromkeys(("n_group", "topk_group"), "groups of experts"),
    "first_k_dense_replace": "leading layers of another kind",
    "routed_scaling_factor": "factor of its experts' weights",
    "num_nextn_predict_layers": "modules for multi-token prediction",
    **dict.fromkeys(
        ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
        "latent attention",
    ),
    **dict.fromkeys(
        (
            *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim"),
            *("linear_value_head_dim", "linear_conv_kernel_dim", "linear_allow_neg_eigval"),
        ),
        "linear attention",
    ),
}
# Supported values of fields, the default first.
LLAMA_VALUES: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, True),
    "mlp_bias": (False,),
    "tie_word_embeddings": (False, True),
    "scaled_initialization": (False, True),
}


@dataclass(frozen=True)
class Family:
    """One architecture.

    Args:
        model: the class, `module:name`, a `LanguageModel` that names its Hugging Face tensors.
        huggingface: the class in transformers.
        model_type: in config.json; by default the family's own name.
        fields: names in config.json of fields of `Model`: of those that Llama does not have, and of those with another name.
        values: supported values that differ from Llama's, the default first.
        defaults: transformers' defaults of fields that a config.json omits, by names of `Model`'s fields and `rms_norm_eps`.
        fixed: config.json fields with a single supported value.
        unused: further config.json keys that training does not need; other unknown keys are rejected.
        rotary: whether it has RoPE, and Llama's names in config.json.
        norm: "rms", with 1 + weight ("unit_offset"), or LayerNorm with a bias ("layer") or without ("centered").
        norm_position: of a layer's norms: before attention and MLP, after them, or around them. Those of layers with linear
            attention are always before them.
        qk_norm: RMSNorm of query and key heads before rotation, each ("heads") or all of a token's together ("projections").
        gated_attention: whether attention's output is multiplied by the sigmoid of a projected gate.
        linear_attention: how layers without full attention mix tokens, if not by attention within a window: "fused", "split" or
            "separate" by the projections in transformers that the Gated DeltaNet has (modeling/models/families/hybrid.py).
        linear_norm_eps: epsilon of the norm of its output; None: `norm_eps`.
        free_head_dim: whether head_dim may differ from hidden_size / num_attention_heads.
        output_bias: whether attention's biases include that of the output projection.
        adjacent_pairs: whether RoPE rotates adjacent elements, instead of those of the two halves of a head.
        local_rope: whether layers with a window have unscaled RoPE.
        scaled_embedding: whether token embeddings are multiplied by √hidden_size.
        tensors: names in transformers of a layer's modules, where they differ from Llama's; parts of one tensor share a name.
        qkv_by_head: whether queries, keys and values that share a tensor are in it head by head.
        root: name in transformers of the model without its head, if `ends` is given.
        ends: names in transformers of embedding, norm and head, where they are not Llama's.
        parametrized: whether the scales of μP and CompleteP are known.
        selection_bias: whether experts are chosen by logits plus a bias per expert.
        expert_bias: whether router and experts have biases.
        mlp_matrices: weights of an MLP: gate, up and down, or up and down.
        further_parameters: elements that a layer has beyond those of the features above.
        source: the paper or the model card that describes it.
    """

    model: str
    huggingface: str
    model_type: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=lambda: {"attention_dropout": 0.0})
    unused: tuple[str, ...] = ()
    rotary: bool = True
    norm: Literal["rms", "unit_offset", "layer", "centered"] = "rms"
    norm_position: Literal["before", "after", "around"] = "before"
    qk_norm: Literal["none", "heads", "projections"] = "none"
    gated_attention: bool = False
    linear_attention: Literal["none", "fused", "split", "separate"] = "none"
    linear_norm_eps: float | None = None
    free_head_dim: bool = True
    output_bias: bool = True
    adjacent_pairs: bool = False
    local_rope: bool = False
    scaled_embedding: bool = False
    tensors: Mapping[str, str] = field(default_factory=dict)
    qkv_by_head: bool = False
    root: str = "model"
    ends: Mapping[str, str] = field(default_factory=dict)
    parametrized: bool = False
    selection_bias: bool = False
    expert_bias: bool = False
    mlp_matrices: int = 3
    further_parameters: Callable[[Model], int] = lambda model: 0
    source: str = ""

    @property
    def supported(self) -> Mapping[str, tuple[Any, ...]]:
        """Supported values of fields, the default first."""
        return {**LLAMA_VALUES, **self.values}

    def is_fused(self, layer: str) -> bool:
        """Whether transformers has the parts of a layer, `attention.qkv` or `mlp.gate_up`, in one tensor."""
        parts = [theirs for ours, theirs in self.tensors.items() if ours.startswith(f"{layer}.")]
        return len(set(parts)) < len(parts)


def same(*names: str) -> dict[str, str]:
    """Fields that have the same names in config.json."""
    return {name: name for name in names}


def own(huggingface: str, source: str, model: str = "llama:Llama", **facts: Any) -> Family:
    """A family of this package, whose model class, `module:name`, is in modeling/models/families."""
    return Family(f"modeling.models.families.{model}", f"{huggingface}ForCausalLM", source=source, **facts)


FIXED = {"attention_dropout": 0.0}
EXPERTS = same("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
