"""Families of hybrids of attention and linear attention, a part of the table in `families.py`."""

from __future__ import annotations

from profiles.sections.family import EXPERTS, FIXED, own, same

_LINEAR = same(
    *("full_attention_every", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim"),
    *("linear_value_head_dim", "linear_conv_kernel_dim"),
)
_QWEN_LINEAR = {
    "rms_norm_eps": 1e-6,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_every": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_QWEN_FIXED = {**FIXED, "attn_output_gate": True, "mtp_use_dedicated_embeddings": False}
# Further modules for multi-token prediction would share the projection and the norms of the first.
_ONE_MODULE = {"num_nextn_predict_layers": (None, 1)}

HYBRIDS = {
    "qwen3_next": own(
        "Qwen3Next",
        "huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct",
        model="hybrid:Qwen3Next",
        fields={
            **EXPERTS,
            **_LINEAR,
            **same("partial_rotary_factor", "shared_expert_intermediate_size", "num_nextn_predict_layers"),
        },
        values=_ONE_MODULE,
        defaults={
            **_QWEN_LINEAR,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "norm_topk_prob": True,
        },
        fixed={**_QWEN_FIXED, "mlp_only_layers": [], "decoder_sparse_step": 1},
        unused=("mtp_num_hidden_layers",),  # the files tell whether there is a module
        norm="unit_offset",
        qk_norm="heads",
        gated_attention=True,
        linear_attention="fused",
    ),
    "qwen3_5": own(
        "Qwen3_5",
        "huggingface.co/Qwen/Qwen3.5-27B",
        model="hybrid:Hybrid",
        model_type="qwen3_5_text",
        fields={**_LINEAR, **same("partial_rotary_factor", "num_nextn_predict_layers")},
        values={"tie_word_embeddings": (False, True), **_ONE_MODULE},
        defaults={**_QWEN_LINEAR, "num_key_value_heads": 4},
        fixed={**_QWEN_FIXED, "output_gate_type": "swish"},
        unused=(
            *("mtp_num_hidden_layers", "mamba_ssm_dtype"),  # the files tell whether there is a module
            *("mrope_section", "mrope_interleaved"),  # of RoPE, without effect on text
        ),
        norm="unit_offset",
        qk_norm="heads",
        gated_attention=True,
        linear_attention="split",
    ),
    "olmo_hybrid": own(
        "OlmoHybrid",
        "huggingface.co/allenai/Olmo-Hybrid-7B",
        model="hybrid:OlmoHybrid",
        fields={**_LINEAR, **same("linear_allow_neg_eigval", "no_rope_layer_interval")},
        defaults={
            "rms_norm_eps": 1e-6,
            "full_attention_every": 4,
            "linear_conv_kernel_dim": 4,
            "linear_allow_neg_eigval": True,
        },
        unused=(
            *("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max"),  # of initial values
            "linear_dt_init_floor",
        ),
        norm_position="after",
        qk_norm="projections",
        linear_attention="separate",
        linear_norm_eps=1e-5,
        free_head_dim=False,
    ),
}
