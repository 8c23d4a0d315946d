"""Model families: the table of features in which the architectures differ from Llama.

One entry describes a family completely: its layers, the names of its weights, its profiles and its config.json. The model, the
conversion both ways, the export and the planner read it, and what it does not list is rejected. `family.py` explains each
argument. A package adds a family, an
instance of `Family`, as an entry point of the group `trainshed.models`, here as `arcee`:

    [project.entry-points."trainshed.models"]
    arcee = "my_package.arcee:FAMILY"
"""

from __future__ import annotations

from functools import cache

from profiles import plugins
from profiles.errors import ProfileError
from profiles.sections.family import EXPERTS, FIXED, OPTIONAL, Family, own, same
from profiles.sections.hybrid_families import HYBRIDS

__all__ = ["OPTIONAL", "Family"]

GROUP = "trainshed.models"  # of entry points
NXD_SHARDS = ("llama", "mistral", "mixtral", "dbrx")  # architectures whose NxD shards are read and written

_FEW_EXPERTS = {"num_experts": "num_local_experts", "num_experts_per_tok": "num_experts_per_tok"}
_NO_BIAS = {"attention_bias": (False,)}
_POST_NORMS = {"attention_norm": "post_attention_layernorm", "mlp_norm": "post_feedforward_layernorm"}
_FUSED_MLP = dict.fromkeys(("mlp.gate_up.gate", "mlp.gate_up.up"), "mlp.gate_up_proj")
_FUSED_QKV = dict.fromkeys(("attention.qkv.q", "attention.qkv.k", "attention.qkv.v"), "self_attn.qkv_proj")
_MULTIPLIERS = same("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
_NO_WINDOW = ("sliding_window", "max_window_layers")  # have no effect, because use_sliding_window is false
_GEMMA_FIELDS = {
    "hidden_act": "hidden_activation",
    **same("sliding_window", "full_attention_every", "query_pre_attn_scalar"),
}
_GEMMA_VALUES = {"hidden_act": ("gelu_pytorch_tanh",), "tie_word_embeddings": (True, False)}
_GEMMA_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_GEMMA_NORMS = {
    "attention_output_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}

OWN = {
    "llama": own(
        "Llama",
        "arXiv 2307.09288, 2407.21783",
        values={"mlp_bias": (False, True)},
        defaults={"rms_norm_eps": 1e-6},
        parametrized=True,
    ),
    "mistral": own(
        "Mistral",
        "arXiv 2310.06825",
        fields=same("sliding_window"),
        values=_NO_BIAS,
        defaults={"rms_norm_eps": 1e-6, "num_key_value_heads": 8, "sliding_window": 4096},
        parametrized=True,
    ),
    "qwen3": own(
        "Qwen3",
        "arXiv 2505.09388",
        defaults={"rms_norm_eps": 1e-6, "num_key_value_heads": 32, "head_dim": 128},
        fixed={**FIXED, "use_sliding_window": False},
        unused=_NO_WINDOW,
        qk_norm="heads",
        parametrized=True,
    ),
    "olmo2": own(
        "Olmo2",
        "arXiv 2501.00656",
        defaults={"rms_norm_eps": 1e-5},
        norm_position="after",
        qk_norm="projections",
        tensors=_POST_NORMS,
    ),
    "qwen2": own(
        "Qwen2",
        "arXiv 2407.10671, 2412.15115",
        fields=same("sliding_window", "max_window_layers"),
        values={"attention_bias": (True,)},
        defaults={
            "rms_norm_eps": 1e-6,
            "num_key_value_heads": 32,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
        output_bias=False,
    ),
    "olmo3": own(
        "Olmo3",
        "allenai.org/papers/olmo3",
        fields=same("sliding_window", "full_attention_every"),
        defaults={
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "sliding_window": 4096,
            "full_attention_every": 4,
        },
        norm_position="after",
        qk_norm="projections",
        local_rope=True,
        tensors=_POST_NORMS,
    ),
    "smollm3": own(
        "SmolLM3",
        "huggingface.co/blog/smollm3",
        fields=same("no_rope_layer_interval"),
        values={"mlp_bias": (False, True), "tie_word_embeddings": (True, False)},
        defaults={
            "rms_norm_eps": 1e-6,
            "num_key_value_heads": 4,
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
            "no_rope_layer_interval": 4,
        },
        fixed={**FIXED, "use_sliding_window": False},
        unused=_NO_WINDOW,
    ),
    "granite": own(
        "Granite",
        "huggingface.co/ibm-granite/granite-3.3-8b-base",
        fields=_MULTIPLIERS,
        values={"mlp_bias": (False, True)},
        defaults={"rms_norm_eps": 1e-6, **dict.fromkeys(_MULTIPLIERS, 1.0)},
    ),
    "glm4": own(
        "Glm4",
        "huggingface.co/zai-org/GLM-4-9B-0414",
        fields=same("partial_rotary_factor"),
        values={"attention_bias": (True, False)},
        defaults={
            "rms_norm_eps": 1.5625e-7,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "partial_rotary_factor": 0.5,
        },
        norm_position="around",
        output_bias=False,
        adjacent_pairs=True,
        tensors={
            **_FUSED_MLP,
            "attention_output_norm": "post_self_attn_layernorm",
            "mlp_output_norm": "post_mlp_layernorm",
        },
    ),
    "gemma2": own(
        "Gemma2",
        "arXiv 2408.00118",
        fields={**_GEMMA_FIELDS, **same("attn_logit_softcapping", "final_logit_softcapping")},
        values=_GEMMA_VALUES,
        defaults={
            **_GEMMA_DEFAULTS,
            "full_attention_every": 2,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        fixed={**FIXED, "use_bidirectional_attention": None},
        unused=("hidden_act", "sliding_window_size"),  # of published files, beside the keys that are read
        norm="unit_offset",
        norm_position="around",
        scaled_embedding=True,
        tensors=_GEMMA_NORMS,
    ),
    "gemma3": own(
        "Gemma3",
        "arXiv 2503.19786",
        model_type="gemma3_text",
        fields={**_GEMMA_FIELDS, **same("rope_local_base_freq")},
        values=_GEMMA_VALUES,
        defaults={
            **_GEMMA_DEFAULTS,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "full_attention_every": 6,
        },
        fixed={
            **FIXED,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "use_bidirectional_attention": False,
        },
        unused=("_sliding_window_pattern",),  # layer_types has it
        norm="unit_offset",
        norm_position="around",
        qk_norm="heads",
        local_rope=True,
        scaled_embedding=True,
        tensors=_GEMMA_NORMS,
    ),
    "phi3": own(
        "Phi3",
        "arXiv 2404.14219, 2412.08905",
        fields=same("sliding_window", "partial_rotary_factor"),
        values={**_NO_BIAS, "rope_scaling": (None,)},
        defaults={"rms_norm_eps": 1e-5, "sliding_window": None},
        fixed={**FIXED, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
        unused=("original_max_position_embeddings",),  # of LongRoPE, which is rejected
        tensors={**_FUSED_QKV, **_FUSED_MLP},
    ),
    "ministral": own(
        "Ministral",
        "huggingface.co/mistralai/Ministral-8B-Instruct-2410",
        fields=same("sliding_window", "full_attention_every", "max_window_layers"),
        values=_NO_BIAS,
        defaults={"rms_norm_eps": 1e-6, "num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "starcoder2": own(
        "Starcoder2",
        "arXiv 2402.19173",
        fields={**same("sliding_window"), "norm_eps": "norm_epsilon"},
        values={
            "hidden_act": ("gelu_pytorch_tanh",),
            "attention_bias": (True,),
            "mlp_bias": (True,),
            "tie_word_embeddings": (True, False),
        },
        defaults={
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 2,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "initializer_range": 0.018042,
        },
        fixed={**FIXED, "residual_dropout": 0.0, "embedding_dropout": 0.0, "use_bias": True},
        unused=("mlp_type", "norm_type", "rms_norm_eps"),  # of published files; norm_epsilon is read
        norm="layer",
        mlp_matrices=2,
        tensors={"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"},
    ),
    "stablelm": own(
        "StableLm",
        "arXiv 2402.17834",
        fields={
            **same("partial_rotary_factor"),
            "norm_eps": "layer_norm_eps",
            "attention_bias": "use_qkv_bias",
        },
        defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": 32, "partial_rotary_factor": 0.25},
        fixed={**FIXED, "hidden_dropout": 0.0, "qk_layernorm": False, "use_parallel_residual": False},
        norm="layer",
        free_head_dim=False,
        output_bias=False,
    ),
    "gpt_neox": own(
        "GPTNeoX",
        "arXiv 2204.06745, 2304.01373",
        fields={
            "norm_eps": "layer_norm_eps",
            "rope_theta": "rotary_emb_base",
            "partial_rotary_factor": "rotary_pct",
            **same("use_parallel_residual"),
        },
        values={
            "hidden_act": ("gelu", "gelu_pytorch_tanh"),
            "attention_bias": (True, False),
            "mlp_bias": (True,),
            "tie_word_embeddings": (False,),
        },
        defaults={"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.25, "use_parallel_residual": True},
        fixed={**FIXED, "hidden_dropout": 0.0},
        norm="layer",
        free_head_dim=False,
        mlp_matrices=2,
        tensors={
            **dict.fromkeys((f"attention.qkv.{part}" for part in "qkv"), "attention.query_key_value"),
            "attention.output": "attention.dense",
            "mlp.up": "mlp.dense_h_to_4h",
            "mlp.down": "mlp.dense_4h_to_h",
        },
        qkv_by_head=True,
        root="gpt_neox",
        ends={"embedding": "gpt_neox.embed_in", "norm": "gpt_neox.final_layer_norm", "head": "embed_out"},
    ),
    "mixtral": own(
        "Mixtral",
        "arXiv 2401.04088",
        model="mixtral:Mixtral",
        fields={**_FEW_EXPERTS, **same("sliding_window")},
        values=_NO_BIAS,
        defaults={
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_key_value_heads": 8,
            "sliding_window": None,
            "num_experts": 8,
            "num_experts_per_tok": 2,
        },
        fixed={**FIXED, "router_jitter_noise": 0.0},
    ),
    "qwen3_moe": own(
        "Qwen3Moe",
        "arXiv 2505.09388",
        model="mixtral:Qwen3Moe",
        fields=EXPERTS,
        defaults={
            "rms_norm_eps": 1e-6,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
        },
        fixed={**FIXED, "use_sliding_window": False, "mlp_only_layers": [], "decoder_sparse_step": 1},
        unused=_NO_WINDOW,
        qk_norm="heads",
    ),
    "dbrx": own(
        "Dbrx",
        "databricks.com/blog/introducing-dbrx-new-state-art-open-llm",
        model="dbrx:Dbrx",
        fields=same("num_experts", "num_experts_per_tok", "norm_topk_prob", "clip_qkv"),
        values={
            **_NO_BIAS,
            "norm_eps": (1e-5,),  # not in the config.json
            "tie_word_embeddings": (False,),
        },
        fixed={},
        norm="centered",
    ),
    "gpt_oss": own(
        "GptOss",
        "arXiv 2508.10925",
        model="gpt_oss:GptOss",
        fields={**_FEW_EXPERTS, **same("sliding_window", "full_attention_every")},
        values={"attention_bias": (True, False)},
        defaults={
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "sliding_window": 128,
            "full_attention_every": 2,
            "num_experts": 128,
            "num_experts_per_tok": 4,
        },
        fixed={**FIXED, "swiglu_limit": 7.0, "swiglu_alpha": 1.702},
        unused=("experts_per_token", "initial_context_length"),
        expert_bias=True,
        further_parameters=lambda model: model.num_attention_heads,  # sinks
    ),
    "deepseek_v3": own(
        "DeepseekV3",
        "arXiv 2412.19437",
        model="deepseek_v3:DeepseekV3",
        fields={
            **EXPERTS,
            "num_experts": "n_routed_experts",
            **same("n_shared_experts", "first_k_dense_replace", "n_group", "topk_group"),
            **same("routed_scaling_factor", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim"),
            **same("qk_rope_head_dim", "v_head_dim", "num_nextn_predict_layers"),
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
            "num_nextn_predict_layers": 1,
        },
        fixed={
            **FIXED,
            "attention_bias": False,
            "rope_interleave": True,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "moe_layer_freq": 1,
        },
        unused=("qk_head_dim",),
        selection_bias=True,
        further_parameters=lambda model: (model.q_lora_rank or 0) + (model.kv_lora_rank or 0),  # norms
    ),
    "glm4_moe": own(
        "Glm4Moe",
        "arXiv 2508.06471",
        model="deepseek_v3:Glm4Moe",
        fields={
            **EXPERTS,
            "num_experts": "n_routed_experts",
            **same("n_shared_experts", "first_k_dense_replace", "n_group", "topk_group"),
            **same(
                "routed_scaling_factor", "partial_rotary_factor", "use_qk_norm", "num_nextn_predict_layers"
            ),
        },
        defaults={
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 8,
            "partial_rotary_factor": 0.5,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408,
            "norm_topk_prob": True,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
            "use_qk_norm": False,
            "num_nextn_predict_layers": 1,
        },
        qk_norm="heads",
        output_bias=False,
        selection_bias=True,
    ),
    **HYBRIDS,
    "gpt": Family(
        "modeling.models.families.gpt:GPT",
        "GPT2LMHeadModel",
        source="arXiv 2005.14165",
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
        norm="layer",
        free_head_dim=False,
        mlp_matrices=2,
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
