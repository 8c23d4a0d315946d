"""Every dense family against transformers, at odd shapes: logits, loss, gradients, stored tensors."""

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from modeling.models.families import model_class
from modeling.models.families.llama import Llama
from parallel import LayerNorm
from profiles.errors import ProfileError
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
    "ministral": [{"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}],
    "starcoder2": [{"sliding_window": 5}, {"tie_word_embeddings": False}],
    "stablelm": [{"head_dim": 10}, {"head_dim": 10, "partial_rotary_factor": 0.4, "use_qkv_bias": True}],
}  # fmt: skip
NEOX = {"num_key_value_heads": 4, "head_dim": 10, "hidden_dropout": 0.0, "rotary_pct": 0.4}
CONFIGS["gpt_neox"] = [
    {**NEOX, "use_parallel_residual": False, "attention_bias": False, "rotary_pct": 1.0},
    NEOX,
]
CASES = [(name, fields) for name, configs in CONFIGS.items() for fields in configs]


def test_every_dense_family_has_a_config_and_a_source():
    dense = {name for name in families.OWN if model_class(name) is Llama}
    assert CONFIGS.keys() == dense
    assert all(family.source for family in families.OWN.values())


@pytest.mark.parametrize(("name", "fields"), CASES, ids=[name for name, _ in CASES])
def test_logits_loss_and_gradients_match_transformers(name, fields):
    config = AutoConfig.for_model(families.OWN[name].model_type or name, **{**SIZES, **fields})
    assert from_config_json(config.to_dict())["architecture"] == name
    # windows are of 5 tokens
    assert_match(AutoModelForCausalLM.from_config, config, lengths=(24, 7, 6, 5, 4, 1))


def test_a_window_that_ends_within_the_sequence_matches_transformers():
    """4,097 tokens, more than a window of a published model and no multiple of any block of attention."""
    fields = {
        "num_hidden_layers": 2,
        "sliding_window": 4096,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    config = AutoConfig.for_model("olmo3", **{**SIZES, **fields})
    assert_match(AutoModelForCausalLM.from_config, config, lengths=(4097,))


class WithNormLayer(Llama):
    """A model of a package, written for an earlier version."""

    norm_layer = LayerNorm


def test_norm_layer_of_a_package_is_rejected_by_name(monkeypatch):
    family = families.Family(f"{__name__}:WithNormLayer", "")
    monkeypatch.setattr(families, "find", lambda name: family)
    with pytest.raises(
        ProfileError, match=r"architecture = theirs: norm_layer of \S+:WithNormLayer is not read"
    ):
        model_class("theirs")
