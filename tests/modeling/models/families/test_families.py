"""Every dense family against transformers, at odd shapes: logits, loss, gradients, stored tensors."""

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from modeling.models.families import model_class
from modeling.models.families.llama import Llama
from profiles.huggingface.config import from_config_json
from profiles.sections import families
from tests.modeling.models.families.huggingface import assert_match

# Layers and vocabulary are no multiples, and heads are not hidden_size / num_attention_heads where they need not be.
SIZES = {
    "hidden_size": 40,
    "intermediate_size": 54,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "vocab_size": 101,
    "initializer_range": 0.1,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "rope_theta": 5e5}
MULTIPLIERS = {"embedding_multiplier": 12.0, "attention_multiplier": 0.07, "residual_multiplier": 0.22}
GEMMA = {"sliding_window": 5, "query_pre_attn_scalar": 20}
# transformers' other attention ignores soft caps
CAPPED = {
    **GEMMA,
    "attn_logit_softcapping": 0.7,
    "final_logit_softcapping": 0.9,
    "attn_implementation": "eager",
}
NEOX = {"num_key_value_heads": 4, "head_dim": 10, "hidden_dropout": 0.0, "rotary_pct": 0.4}
# Configs of each family that together use all of its features; the last is also converted (test_convert.py).
CONFIGS = {
    "llama": [{}],
    "mistral": [{"sliding_window": 5}],
    "qwen2": [
        {},
        {"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    ],
    "qwen3": [{}, {"tie_word_embeddings": True, "attention_bias": True}],
    "olmo2": [{}, {"attention_bias": True}],
    "olmo3": [
        {"sliding_window": 5},  # of 3 layers, all
        {
            "num_hidden_layers": 5,
            "sliding_window": 5,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
            },
        },
    ],
    "smollm3": [
        {"no_rope_layer_interval": 2},
        {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True, "num_hidden_layers": 5},
    ],
    "granite": [
        {**MULTIPLIERS, "logits_scaling": 6.0, "tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True, "attention_multiplier": 0.3},
    ],
    "glm4": [{"attention_bias": False, "partial_rotary_factor": 1.0}, {}],
    "gemma2": [
        {**CAPPED, "attn_logit_softcapping": None, "tie_word_embeddings": False},
        {**CAPPED, "num_hidden_layers": 4, "attention_bias": True},
    ],
    "gemma3": [
        {**GEMMA, "tie_word_embeddings": False},
        {
            **GEMMA, "num_hidden_layers": 8, "attention_bias": True, "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ],
    "gpt_neox": [{**NEOX, "use_parallel_residual": False, "attention_bias": False, "rotary_pct": 1.0}, NEOX],
    "phi3": [{"sliding_window": 5}, {"partial_rotary_factor": 0.67}],
    "ministral": [{"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"] * 2, "num_hidden_layers": 4}],
    "starcoder2": [{"sliding_window": 5}, {"tie_word_embeddings": False}],
    "stablelm": [{"head_dim": 10}, {"head_dim": 10, "partial_rotary_factor": 0.4, "use_qkv_bias": True}],
}  # fmt: skip
# Those with linear attention, in patterns that do not divide the layers, and chunks that do not divide the tokens.
LINEAR = {
    "initializer_range": 0.05,  # with larger gates, the gradients of decays mostly cancel, in transformers too
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 10,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
MIXED = {
    "qwen3_next": [
        {**LINEAR, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": False,
         "shared_expert_intermediate_size": 14, "attention_bias": True, "partial_rotary_factor": 0.5},
        {**LINEAR, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "linear_num_value_heads": 2,
         "shared_expert_intermediate_size": 24, "linear_conv_kernel_dim": 3, "partial_rotary_factor": 0.5},
    ],
    "qwen3_5": [
        {**LINEAR, "tie_word_embeddings": True, "partial_rotary_factor": 0.5},
        {**LINEAR, "linear_num_key_heads": 4, "partial_rotary_factor": 0.5},
    ],
    "olmo_hybrid": [
        {**LINEAR, "head_dim": 10, "linear_allow_neg_eigval": False},
        {**LINEAR, "head_dim": 10, "rope_parameters": {"rope_type": "default", "rope_theta": None}},
    ],
}  # fmt: skip
CASES = [(name, fields) for name, configs in {**CONFIGS, **MIXED}.items() for fields in configs]


def test_every_dense_family_has_a_config_and_a_source():
    dense = {name for name in families.OWN if model_class(name) is Llama}
    assert CONFIGS.keys() == dense
    assert all(family.source for family in families.OWN.values())


@pytest.mark.parametrize(("name", "fields"), CASES, ids=[name for name, _ in CASES])
def test_logits_loss_and_gradients_match_transformers(name, fields):
    config = AutoConfig.for_model(families.OWN[name].model_type or name, **{**SIZES, **fields})
    assert from_config_json(config.to_dict())["architecture"] == name
    # windows are of 5 tokens, chunks of linear attention of 64
    lengths = (130, 7, 1) if name in MIXED else (24, 7, 6, 5, 4, 1)
    assert_match(AutoModelForCausalLM.from_config, config, lengths=lengths)


WINDOW = {
    "num_hidden_layers": 2,
    "sliding_window": 4096,
    "layer_types": ["sliding_attention", "full_attention"],
}


@pytest.mark.parametrize(("name", "fields"), [("olmo3", WINDOW), ("qwen3_next", MIXED["qwen3_next"][0])])
def test_long_sequences_match_transformers(name, fields):
    """4,097 tokens: more than a published window, and no multiple of a block of attention or a chunk."""
    config = AutoConfig.for_model(name, **{**SIZES, **fields})
    assert_match(AutoModelForCausalLM.from_config, config, lengths=(4097,))
