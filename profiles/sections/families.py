"""Model families: how the profiles and config.json files of the architectures differ.

A family has Llama's fields of `Model`, unless its entry says otherwise. A package adds a family, an instance of `Family`, as an
entry point of the group `trainshed.models`, here as `qwen2`:

    [project.entry-points."trainshed.models"]
    qwen2 = "my_package.qwen2:FAMILY"
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from profiles import plugins
from profiles.errors import ProfileError

if TYPE_CHECKING:
    from profiles.sections.model import Model

GROUP = "trainshed.models"  # of entry points
NXD_SHARDS = ("llama", "mistral", "mixtral", "dbrx")  # architectures whose NxD shards are read and written
# Fields that only some families have, and the feature that each belongs to.
OPTIONAL = {
    "sliding_window": "sliding window",
    "full_attention_every": "layers of different windows",
    "clip_qkv": "clipped heads",
    **dict.fromkeys(("num_experts", "num_experts_per_tok", "moe_intermediate_size"), "experts"),
    "n_shared_experts": "shared experts",
    **dict.fromkeys(("n_group", "topk_group"), "groups of experts"),
    "first_k_dense_replace": "leading layers of another kind",
    "routed_scaling_factor": "factor of its experts' weights",
    **dict.fromkeys(
        ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
        "latent attention",
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
        fields: fields of `Model` in addition to Llama's, and their names in config.json.
        values: supported values that differ from Llama's, the default first.
        defaults: transformers' defaults of fields that a config.json omits, by names of `Model`'s fields and `rms_norm_eps`.
        fixed: config.json fields with a single supported value.
        unused: further config.json keys that training does not need; other unknown keys are rejected.
        rotary: whether it has RoPE, and Llama's names in config.json.
        parametrized: whether the scales of μP and CompleteP are known.
        selection_bias: whether experts are chosen by logits plus a bias per expert.
        expert_bias: whether router and experts have biases.
        mlp_matrices: weights of an MLP: gate, up and down, or up and down.
        further_parameters: elements that a layer has beyond Llama's projections, MLP and two norms.
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
    parametrized: bool = False
    selection_bias: bool = False
    expert_bias: bool = False
    mlp_matrices: int = 3
    further_parameters: Callable[[Model], int] = lambda model: 0

    @property
    def supported(self) -> Mapping[str, tuple[Any, ...]]:
        """Supported values of fields, the default first."""
        return {**LLAMA_VALUES, **self.values}


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


def _own(name: str, cls: str, **facts: Any) -> Family:
    return Family(f"modeling.models.families.{name}:{cls}", f"{cls}ForCausalLM", **facts)


_FIXED = {"attention_dropout": 0.0}
_EXPERTS = _same("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
_FEW_EXPERTS = {"num_experts": "num_local_experts", "num_experts_per_tok": "num_experts_per_tok"}
_NO_BIAS = {"attention_bias": (False,)}
_NO_WINDOW = ("sliding_window", "max_window_layers")  # have no effect, because use_sliding_window is false

OWN = {
    "llama": _own(
        "llama",
        "Llama",
        values={"mlp_bias": (False, True)},
        defaults={"rms_norm_eps": 1e-6},
        parametrized=True,
    ),
    "mistral": _own(
        "mistral",
        "Mistral",
        fields=_same("sliding_window"),
        values=_NO_BIAS,
        defaults={"rms_norm_eps": 1e-6, "num_key_value_heads": 8, "sliding_window": 4096},
        parametrized=True,
    ),
    "qwen3": _own(
        "qwen3",
        "Qwen3",
        defaults={"rms_norm_eps": 1e-6, "num_key_value_heads": 32, "head_dim": 128},
        fixed={**_FIXED, "use_sliding_window": False},
        unused=_NO_WINDOW,
        parametrized=True,
        further_parameters=lambda model: 2 * model.head_dim,
    ),
    "olmo2": _own(
        "olmo2",
        "Olmo2",
        defaults={"rms_norm_eps": 1e-5},
        further_parameters=lambda model: (
            (model.num_attention_heads + model.num_key_value_heads) * model.head_dim
        ),
    ),
    "mixtral": _own(
        "mixtral",
        "Mixtral",
        fields={**_FEW_EXPERTS, **_same("sliding_window")},
        values=_NO_BIAS,
        defaults={
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_key_value_heads": 8,
            "sliding_window": None,
            "num_experts": 8,
            "num_experts_per_tok": 2,
        },
        fixed={**_FIXED, "router_jitter_noise": 0.0},
    ),
    "qwen3_moe": _own(
        "qwen3_moe",
        "Qwen3Moe",
        fields=_EXPERTS,
        defaults={
            "rms_norm_eps": 1e-6,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
        },
        fixed={**_FIXED, "use_sliding_window": False, "mlp_only_layers": [], "decoder_sparse_step": 1},
        unused=_NO_WINDOW,
        further_parameters=lambda model: 2 * model.head_dim,
    ),
    "dbrx": _own(
        "dbrx",
        "Dbrx",
        fields=_same("num_experts", "num_experts_per_tok", "norm_topk_prob", "clip_qkv"),
        values={
            **_NO_BIAS,
            "norm_eps": (1e-5,),  # not in the config.json
            "tie_word_embeddings": (False,),
        },
        fixed={},
    ),
    "gpt_oss": _own(
        "gpt_oss",
        "GptOss",
        fields={**_FEW_EXPERTS, **_same("sliding_window", "full_attention_every")},
        values={"attention_bias": (True, False)},
        defaults={
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "sliding_window": 128,
            "num_experts": 128,
            "num_experts_per_tok": 4,
        },
        fixed={**_FIXED, "swiglu_limit": 7.0, "swiglu_alpha": 1.702},
        unused=("experts_per_token", "initial_context_length"),
        expert_bias=True,
        further_parameters=lambda model: model.num_attention_heads,  # sinks
    ),
    "deepseek_v3": _own(
        "deepseek_v3",
        "DeepseekV3",
        fields={
            **_EXPERTS,
            "num_experts": "n_routed_experts",
            **_same("n_shared_experts", "first_k_dense_replace", "n_group", "topk_group"),
            **_same("routed_scaling_factor", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim"),
            **_same("qk_rope_head_dim", "v_head_dim"),
        },
        values=_NO_BIAS,
        defaults={
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
        fixed={
            **_FIXED,
            "attention_bias": False,
            "rope_interleave": True,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "moe_layer_freq": 1,
        },
        unused=("qk_head_dim", "num_nextn_predict_layers"),
        selection_bias=True,
        further_parameters=lambda model: (model.q_lora_rank or 0) + (model.kv_lora_rank or 0),  # norms
    ),
    "gpt": Family(
        "modeling.models.families.gpt:GPT",
        "GPT2LMHeadModel",
        model_type="gpt2",
        values={
            "hidden_act": ("gelu", "gelu_new"),
            "attention_bias": (True, False),
            "mlp_bias": (True, False),
            "tie_word_embeddings": (True, False),
            "scaled_initialization": (True, False),
            "rope_scaling": (None,),
        },
        fixed={
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
        unused=("reorder_and_upcast_attn",),  # the same numbers, more precisely
        rotary=False,
        mlp_matrices=2,
        further_parameters=lambda model: 2 * model.hidden_size,  # biases of two norms
    ),
}


def names() -> list[str]:
    """All architectures: Trainshed's own, then those of installed packages."""
    return [*OWN, *plugins.names(GROUP)]


@cache
def find(name: str) -> Family:
    """The family of an architecture. Raises ProfileError if there is none, or if several packages have it."""
    if name in OWN:
        return OWN[name]
    point = plugins.find(GROUP, name, "architecture", OWN)
    family = plugins.load(point, "architecture")
    if not isinstance(family, Family):
        raise ProfileError("architecture", name, f"{point.value} is not a Family of {__name__}")
    return family
