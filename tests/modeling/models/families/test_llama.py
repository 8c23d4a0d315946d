"""Llama and families with experts against transformers, and the RoPE of all families."""

import importlib

import pytest
import torch
from transformers import (
    AutoConfig,
    DbrxConfig,
    DbrxForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from modeling.models.rope import inverse_frequencies
from profiles.huggingface.config import from_config_json
from profiles.sections import families
from profiles.sections.model import Model
from tests.modeling.models.families.huggingface import assert_match

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 256,
}
CASES = {
    "multi-head": {"num_key_value_heads": 4},
    "grouped-query": {"num_key_value_heads": 2},
    "multi-query": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "wide heads": {"head_dim": 24},
    "rope base": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    "llama3 rope": {"rope_parameters": {**LLAMA3, "rope_theta": 10000.0}},
    "yarn rope": {"rope_parameters": {**YARN, "rope_theta": 10000.0}},
    "yarn rope, truncated": {"rope_parameters": {**YARN, "truncate": True, "rope_theta": 150000.0}},
    "as llama 3.1": {"rope_parameters": {**LLAMA3, "rope_theta": 500000.0}, "num_key_value_heads": 1},
    "as deepseek-coder": {
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100000.0},
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
    },
    "tied, multi-query, with biases": {
        "tie_word_embeddings": True,
        "num_key_value_heads": 1,
        "attention_bias": True,
        "mlp_bias": True,
    },
}


SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "initializer_range": 0.1,
    "pad_token_id": None,
    "eos_token_id": 0,
}


@pytest.mark.parametrize("fields", CASES.values(), ids=CASES.keys())
def test_logits_loss_and_gradients_match_transformers(fields):
    assert_match(LlamaForCausalLM, LlamaConfig(**{**SIZES, **fields}))


DBRX = {
    "d_model": 64,
    "n_heads": 4,
    "n_layers": 2,
    "max_seq_len": 64,
    "vocab_size": 101,
    "initializer_range": 0.1,
    "attn_config": {"clip_qkv": 0.7, "kv_n_heads": 2, "rope_theta": 10000.0},
    "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 5, "moe_top_k": 2},
}
DEEPSEEK = {
    **SIZES,
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "q_lora_rank": 40,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 0,
}
GLM = {
    **SIZES,
    "head_dim": 20,
    "num_hidden_layers": 3,
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 0,
}
MAGNITUDES = {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7, "original_max_position_embeddings": 16}
EXPERTS = {
    "deepseek_v3": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config(
            **DEEPSEEK, rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, **MAGNITUDES}
        ),
    ),
    "deepseek_v3, no query latent, one group": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config(
            **{**DEEPSEEK, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
        ),
    ),
    "glm4_moe, norms of heads": (
        Glm4MoeForCausalLM,
        Glm4MoeConfig(**GLM, use_qk_norm=True, partial_rotary_factor=1.0, n_group=2, topk_group=1),
    ),
    "glm4_moe": (Glm4MoeForCausalLM, Glm4MoeConfig(**GLM, attention_bias=True)),
    "dbrx": (DbrxForCausalLM, DbrxConfig(**DBRX)),
    "gpt_oss": (
        GptOssForCausalLM,
        GptOssConfig(
            **SIZES,
            head_dim=16,
            num_local_experts=5,
            num_experts_per_tok=2,
            sliding_window=7,
            attn_implementation="eager",
        ),
    ),
    "mixtral": (MixtralForCausalLM, MixtralConfig(**SIZES, num_local_experts=5, num_experts_per_tok=2)),
    "qwen3_moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(
            **SIZES,
            head_dim=24,
            num_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=24,
            norm_topk_prob=True,
        ),
    ),
    "qwen3_moe, weights not normalized, tied": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(
            **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, tie_word_embeddings=True
        ),
    ),
}


@pytest.mark.parametrize(("kind", "config"), EXPERTS.values(), ids=EXPERTS.keys())
def test_families_with_experts_match_transformers(kind, config):
    assert_match(kind, config)


@pytest.mark.parametrize("name", [name for name, family in families.OWN.items() if family.rotary])
def test_rope_frequencies_have_the_bits_of_transformers(name):
    """At default sizes: the small models above have too few frequencies to show a difference."""
    for theta in (1e4, 1.5e5, 5e5, 1e6):
        for scaling in (
            {"rope_type": "default"},
            {"rope_type": "linear", "factor": 3.0},
            {**LLAMA3, "original_max_position_embeddings": 8192},
            {**YARN, "original_max_position_embeddings": 4096},
            {**YARN, "original_max_position_embeddings": 4096, "truncate": True, "factor": 40.0},
        ):
            parameters = {**scaling, "rope_theta": theta}
            if name == "phi3" and scaling["rope_type"] != "default":
                continue  # not supported, as in transformers
            if families.OWN[name].local_rope:
                parameters.pop("truncate", None)
                local = {"rope_type": "default", "rope_theta": theta}
                parameters = {"full_attention": parameters, "sliding_attention": local}
            config = AutoConfig.for_model(families.OWN[name].model_type or name, rope_parameters=parameters)
            if name in ("mixtral", "ministral", "glm4_moe"):
                config.head_dim = 128  # its default is none, or not understood by YaRN of transformers
            package = importlib.import_module(type(config).__module__.replace("configuration", "modeling"))
            kind = f"{type(config).__name__.removesuffix('Config')}RotaryEmbedding"
            kind = kind if hasattr(package, kind) else kind.replace("Text", "")
            rope = getattr(package, kind)(config)
            expected = rope.full_attention_inv_freq if families.OWN[name].local_rope else rope.inv_freq
            ours = inverse_frequencies(Model(**from_config_json(config.to_dict())))
            assert torch.equal(ours, expected), (theta, scaling)
