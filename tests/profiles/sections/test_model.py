"""Model section: validation, and config.json in both directions against transformers."""

import json
import math

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from modeling.models.families import huggingface_tensor
from profiles import resolve
from profiles.errors import ProfileError
from profiles.huggingface import unread_keys
from profiles.huggingface.config import TOKEN_IDS, from_config_json, to_config_json
from profiles.sections import families
from profiles.sections.model import Model

LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "norm_eps": 1e-6,
    "rope_theta": 500000.0,
}
GPT = {
    "architecture": "gpt",
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 128,
    "initializer_range": 0.021,
    "dropout": 0.1,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 32,
}
EXPERTS = {**LLAMA, "num_experts": 4, "num_experts_per_tok": 2}
DEEPSEEK = {
    **EXPERTS, "architecture": "deepseek_v3", "num_key_value_heads": 8, "q_lora_rank": 24, "kv_lora_rank": 16,
    "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8, "moe_intermediate_size": 16, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5,
}  # fmt: skip
MULTIPLIERS = {
    "embedding_multiplier": 12.0, "attention_multiplier": 0.0078125, "residual_multiplier": 0.22, "logits_scaling": 16.0,
}  # fmt: skip
LINEAR = {
    **LLAMA,
    "num_hidden_layers": 3,
    "full_attention_every": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
QWEN = {**LINEAR, "architecture": "qwen3_5"}
MODELS = [
    LLAMA,
    {**LLAMA, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    {**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    {**LLAMA, "rope_scaling": LLAMA3},
    {**LLAMA, "rope_scaling": YARN},
    {**LLAMA, "head_dim": 32},
    {**LLAMA, "architecture": "mistral", "sliding_window": 256},
    {**LLAMA, "architecture": "mistral"},
    {**EXPERTS, "architecture": "dbrx", "norm_eps": 1e-5, "clip_qkv": 8.0},
    {**EXPERTS, "architecture": "dbrx", "norm_eps": 1e-5, "norm_topk_prob": False},
    {
        **EXPERTS,
        "architecture": "dbrx",
        "norm_eps": 1e-5,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    },
    {**EXPERTS, "architecture": "gpt_oss", "sliding_window": 128, "full_attention_every": 2},
    {**EXPERTS, "architecture": "gpt_oss", "sliding_window": 128, "rope_scaling": YARN},
    {**DEEPSEEK, "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    {**DEEPSEEK, "q_lora_rank": None, "first_k_dense_replace": 0, "norm_topk_prob": False},
    {**LLAMA, "architecture": "qwen2", "sliding_window": 256, "max_window_layers": 1},
    {**LLAMA, "architecture": "qwen2", "tie_word_embeddings": True},
    {
        **LLAMA,
        "architecture": "olmo3",
        "num_hidden_layers": 5,
        "attention_bias": True,
        "rope_scaling": {**YARN, "truncate": True},
        "sliding_window": 128,
        "full_attention_every": 4,
    },
    {**LLAMA, "architecture": "olmo3"},
    {
        **LLAMA,
        "architecture": "smollm3",
        "num_hidden_layers": 3,
        "no_rope_layer_interval": 2,
        "mlp_bias": True,
    },
    {**LLAMA, "architecture": "smollm3", "tie_word_embeddings": False},
    {**LLAMA, "architecture": "granite", "attention_bias": True, **MULTIPLIERS},
    {**LLAMA, "architecture": "glm4", "partial_rotary_factor": 0.5},
    {**LLAMA, "architecture": "gemma2", "attn_logit_softcapping": 50.0, "query_pre_attn_scalar": 20},
    {**LLAMA, "architecture": "phi3", "sliding_window": 128, "partial_rotary_factor": 0.75},
    {
        **LLAMA,
        "architecture": "ministral",
        "num_hidden_layers": 9,
        "sliding_window": 128,
        "full_attention_every": 4,
        "max_window_layers": 1,
    },
    {**LLAMA, "architecture": "starcoder2", "sliding_window": 128},
    {**LLAMA, "architecture": "stablelm", "partial_rotary_factor": 0.25, "attention_bias": True},
    {**LINEAR, "architecture": "qwen3_5", "partial_rotary_factor": 0.25, "tie_word_embeddings": True},
    {**LINEAR, "architecture": "olmo_hybrid", "linear_allow_neg_eigval": True},
    {
        **LINEAR,
        "architecture": "qwen3_next",
        "partial_rotary_factor": 0.25,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
        "attention_bias": True,
    },
    GPT,
    {**GPT, "tie_word_embeddings": False, "hidden_act": "gelu_new"},
]


def rejection(base: dict, **changes) -> str:
    with pytest.raises(ProfileError) as caught:
        resolve.load("tiny", [f"model={json.dumps({**base, **changes})}"])
    return str(caught.value)


def test_defaults_follow_the_architecture():
    llama, gpt = Model(**LLAMA), Model(**GPT)
    assert (llama.head_dim, llama.hidden_act, llama.tie_word_embeddings, llama.mlp_bias) == (
        8,
        "silu",
        False,
        False,
    )
    assert (gpt.num_key_value_heads, gpt.hidden_act, gpt.tie_word_embeddings, gpt.mlp_bias) == (
        4,
        "gelu",
        True,
        True,
    )


@pytest.mark.parametrize("name", ["rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps"])
def test_aliases_of_norm_eps_set_it(name):
    values = {key: value for key, value in LLAMA.items() if key != "norm_eps"}
    assert Model(**values, **{name: 3e-6}).norm_eps == 3e-6
    assert resolve.load("tiny", [f"model.{name}=3e-6"]).model.norm_eps == 3e-6
    assert "is an alias of norm_eps" in rejection(LLAMA, **{name: 3e-6})


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (LLAMA, {"num_key_value_heads": 3}, "num_key_value_heads = 3: does not divide 8 query heads; nearest valid: 2, 4"),
        (LLAMA, {"hidden_size": 68}, "hidden_size = 68: does not split into 8 even heads, as RoPE rotates pairs"),
        (LLAMA, {"hidden_size": 72}, "and head_dim is not given; nearest valid: 64, 80"),
        (GPT, {"hidden_size": 70}, "does not split into 4 heads, and head_dim is not given; nearest valid: 68, 72"),
        (LLAMA, {"head_dim": 9}, "head_dim = 9: RoPE rotates pairs, so it must be even; nearest valid: 8, 10"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act = gelu: is not supported for llama; nearest valid: silu"),
        (LLAMA, {"dropout": 0.1}, "dropout = 0.1: llama has no dropout; nearest valid: 0.0"),
        (LLAMA, {"sliding_window": 8}, "sliding_window = 8: llama has no sliding window; nearest valid: null"),
        (LLAMA, {"n_group": 2}, "n_group = 2: llama has no groups of experts; nearest valid: null"),
        (LLAMA, {"rope_scaling": {**YARN, "mscale": 1.0}}, "rope_scaling.mscale = 1.0: llama has none"),
        (DEEPSEEK, {"num_key_value_heads": 4}, "num_key_value_heads = 4: deepseek_v3 has keys and values for each query head"),
        (DEEPSEEK, {"head_dim": 12}, "head_dim = 12: is not qk_nope_head_dim + qk_rope_head_dim; nearest valid: 10"),
        (DEEPSEEK, {"v_head_dim": 12}, "v_head_dim = 12: is more than the 10 elements of a query"),
        (DEEPSEEK, {"kv_lora_rank": None}, "kv_lora_rank: is missing; deepseek_v3 needs it"),
        (DEEPSEEK, {"qk_rope_head_dim": 3}, "qk_rope_head_dim = 3: RoPE rotates pairs, so it must be even; nearest valid: 2, 4"),
        (DEEPSEEK, {"n_group": 4}, "n_group = 4: does not divide 4 experts into groups of two or more; nearest valid: 2"),
        (DEEPSEEK, {"topk_group": 3}, "topk_group = 3: is not between 1, which hold num_experts_per_tok 2, and n_group 2"),
        (DEEPSEEK, {"first_k_dense_replace": 2}, "leaves none of 2 layers with experts; nearest valid: 1"),
        (LLAMA, {"linear_num_key_heads": 2}, "linear_num_key_heads = 2: llama has no linear attention; nearest valid: null"),
        (QWEN, {"linear_num_value_heads": 3}, "linear_num_value_heads = 3: is not a multiple of linear_num_key_heads 2"),
        (QWEN, {"linear_key_head_dim": None}, "linear_key_head_dim: is missing; qwen3_5 has linear attention"),
        (QWEN, {"num_nextn_predict_layers": 2}, "_layers = 2: is not supported for qwen3_5; nearest valid: null, 1"),
        (QWEN, {"full_attention_every": 1}, "full_attention_every = 1: leaves no layer with linear attention"),
        (
            QWEN,
            {"full_attention_every": None},
            "full_attention_every: leaves no layer with full attention; nearest valid: 3",
        ),
        (QWEN, {"architecture": "olmo_hybrid", "no_rope_layer_interval": 2}, "all have RoPE, or none has"),
        (LLAMA, {"residual_multiplier": 0.2}, "residual_multiplier = 0.2: llama has no multipliers; nearest valid: null"),
        (LLAMA, {"architecture": "qwen2", "max_window_layers": 1}, "max_window_layers = 1: is set, but sliding_window"),
        (LLAMA, {"architecture": "glm4", "partial_rotary_factor": 0.4}, "partial_rotary_factor = 0.4: rotates 3 elements"),
        (LLAMA, {"architecture": "stablelm", "head_dim": 16}, "stablelm needs 8 heads · head_dim = hidden_size 64"),
        (LLAMA, {"architecture": "phi3", "rope_scaling": YARN}, "rope_scaling = yarn: is not supported for phi3"),
        (LLAMA, {"architecture": "olmo3", "rope_scaling": YARN}, "rope_scaling.truncate = false: transformers always rounds"),
        (LLAMA, {"clip_qkv": 8.0}, "clip_qkv = 8.0: llama has no clipped heads; nearest valid: null"),
        (EXPERTS, {"architecture": "gpt_oss", "full_attention_every": 2}, "is set, but sliding_window"),
        (EXPERTS, {"architecture": "dbrx"}, "norm_eps = 1e-06: is not supported for dbrx; nearest valid: 1e-05"),
        (LLAMA, {"architecture": "bert"}, "of the group trainshed.models; nearest valid: llama, mistral, "),
        (LLAMA, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "nearest valid: linear, llama3, yarn"),
        (LLAMA, {"rope_scaling": {"factor": 2.0}}, "model.rope_scaling = a section: has no rope_type"),
        (LLAMA, {"rope_scaling": {**LLAMA3, "low_freq_factor": 5.0}}, "rope_scaling.high_freq_factor = 4.0: is not above"),
        (LLAMA, {"rope_scaling": {"rope_type": "linear"}}, "model.rope_scaling.factor: is missing"),
        (LLAMA, {"rope_scaling": {**LLAMA3, "facto": 1.0}}, "model.rope_scaling.facto = 1.0: there is no such key"),
        (GPT, {"num_key_value_heads": 2}, "gpt has a KV head for each query head; nearest valid: 4"),
        (GPT, {"head_dim": 32}, "= hidden_size 64; nearest valid: 16"),
        (GPT, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling = linear: is not supported for gpt"),
        (GPT, {"dropout": 1.0}, "model.dropout = 1.0: is not below 1"),
    ],
)  # fmt: skip
def test_impossible_models_are_rejected(base, changes, message):
    assert message in rejection(base, **changes)


@pytest.mark.parametrize(
    "values",
    [
        *MODELS,
        # not in MODELS: transformers' GPT-2 always has biases
        {**GPT, "attention_bias": False},
        {**GPT, "mlp_bias": False},
        {**GPT, "attention_bias": False, "mlp_bias": False},
        {**LINEAR, "architecture": "qwen3_5", "partial_rotary_factor": 0.25, "num_nextn_predict_layers": 1},
        {
            **LINEAR,
            "architecture": "olmo_hybrid",
            "rope_theta": 1e4,
            "linear_allow_neg_eigval": False,
            "no_rope_layer_interval": 1,
        },
    ],
)
def test_config_json_round_trip(values):
    model = Model(**values)
    assert Model(**from_config_json(json.loads(json.dumps(to_config_json(model))))) == model


@pytest.mark.parametrize("values", MODELS)
def test_config_json_agrees_with_transformers(values, tmp_path):
    model = Model(**values)
    (tmp_path / "config.json").write_text(json.dumps({**to_config_json(model), **dict.fromkeys(TOKEN_IDS)}))
    config = AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config)
    biases = (
        (name, bias) for name, bias in built.named_buffers() if name.endswith("e_score_correction_bias")
    )
    shapes = {name: tuple(tensor.shape) for name, tensor in (*built.named_parameters(), *biases)}
    h, f, v = model.hidden_size, model.intermediate_size, model.vocab_size
    assert sum(map(math.prod, shapes.values())) == model.parameters
    if model.architecture == "dbrx":
        theta, scaling = model.rope_theta, model.rope_scaling
        expected = {"rope_theta": theta, **(scaling.model_dump() if scaling else {"rope_type": "default"})}
        assert config.rope_parameters == expected
    elif model.num_experts is not None:
        assert getattr(config, "sliding_window", None) == model.sliding_window
    elif model.architecture != "gpt":
        for name, shape in {
            "layers.1.attention.output.weight": (h, model.num_attention_heads * model.head_dim),
            "layers.0.mlp.down.weight": (h, f),
            "embedding.weight": (v, h),
        }.items():
            assert shapes[huggingface_tensor(model, name).name] == shape
        assert (huggingface_tensor(model, "layers.0.mlp.down.bias").name in shapes) == model.mlp_bias
        rope = config.rope_parameters.get("full_attention", config.rope_parameters)
        assert rope["rope_theta"] == model.rope_theta
        assert int(rope.get("partial_rotary_factor", 1) * model.head_dim) == model.rotary_dim
        scaling = model.rope_scaling.model_dump() if model.rope_scaling else {"rope_type": "default"}
        assert {key: value for key, value in scaling.items() if value is not None}.items() <= rope.items()
        kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
        window = getattr(config, "sliding_window", None)
        windows = [None if kind == "full_attention" else window for kind in kinds]
        assert windows == [model.window(layer) for layer in range(model.num_hidden_layers)]
    else:
        assert shapes["transformer.h.1.mlp.c_fc.weight"] == (h, f)
        assert shapes["transformer.wpe.weight"] == (model.max_position_embeddings, h)
    assert ("lm_head.weight" in shapes) != model.tie_word_embeddings
    config.save_pretrained(tmp_path / "again")
    assert Model(**from_config_json(json.loads((tmp_path / "again/config.json").read_text()))) == model


def other(value):
    """A value of the same type that is not equal."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int | float):
        return value * 2 + 1
    return "another" if isinstance(value, str) else {"another": 1} if isinstance(value, dict) else ["another"]


def read(config):
    """The model of a config.json; None if it is rejected."""
    try:
        return Model(**from_config_json(config))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


SIZES = {"glm4_moe": {"hidden_size": 3840}}  # its default is no multiple of its heads
# Keys that have no effect beside others: those of a window that is not used, or of layers that are listed.
DERIVED = {
    "dbrx": {"num_key_value_heads"},
    "qwen2": {"use_sliding_window", "sliding_window", "max_window_layers"},
    "smollm3": {"no_rope_layer_interval"},
}


@pytest.mark.parametrize("name", families.OWN)
def test_every_key_of_transformers_is_read_or_rejected_and_has_its_default(name):
    family = families.OWN[name]
    config = AutoConfig.for_model(family.model_type or name, **SIZES.get(name, {})).to_dict()
    model = Model(**from_config_json(config))
    sizes = {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"}
    sizes |= {"max_position_embeddings", "model_type", "n_embd", "n_layer", "n_head", "n_positions"}
    for key, value in config.items():
        without = read({other: value for other, value in config.items() if other != key})
        assert without == model or (without is None and key in sizes), key
        if key not in unread_keys.UNUSED | {*family.unused} | DERIVED.get(name, set()):
            assert read({**config, key: other(value)}) != model, key
    for key in ("num_selects", "weight_bits", "quantization", "logit_soft_cap"):
        with pytest.raises(
            ProfileError, match=f"{key} = .*: is not a key that Trainshed or transformers know"
        ):
            from_config_json({**config, key: 1})
        assert read({**config, key: None}) == model


@pytest.mark.parametrize(
    "keys",
    [
        # as published
        {"architectures": ["LLaMAForCausalLM"], "max_sequence_length": 2048, "pretraining_tp": 2},
        {"cache_implementation": "hybrid", "mlp_only_layers": []},
        {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"}, "use_mrope": False},
        {"auto_map": {"AutoModelForCausalLM": "acme/kernels--modeling_llama.LlamaForCausalLM", "AutoTokenizer": ["t.T", None]}},
        {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}},
        {"layer_types": ["full_attention"] * 2, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
        {"rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 2.0, "original_max_position_embeddings": 8}},
    ],
)  # fmt: skip
def test_published_keys_that_training_does_not_need_are_accepted(keys):
    config = to_config_json(Model(**LLAMA))
    expected = {"rope_type": "linear", "factor": 2.0} if "rope_scaling" in keys else None
    assert read({**config, **keys}) == Model(**LLAMA, rope_scaling=expected)


LOCAL = {"sliding_attention": {"rope_theta": 1e4}, "full_attention": {"rope_theta": 5e5}}
LACKING = [  # features that a family has in transformers, or families, that are not supported
    ("qwen2", {"layer_types": ["sliding_attention", "full_attention"]}, "is not full_attention followed by"),
    ("smollm3", {"no_rope_layers": [1, 0, 0]}, "no_rope_layers = 1, 0, 0: does not leave out RoPE in every"),
    ("smollm3", {"use_sliding_window": True}, "use_sliding_window = true: is not supported for smollm3"),
    ("olmo3", {"layer_types": ["full_attention", "sliding_attention"]}, "over 3 layers"),
    ("olmo3", {"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.rope_type = yarn: is not a section"),
    ("olmo3", {"rope_theta": 1e4}, "rope_parameters.sliding_attention.rope_theta = 500000.0: transformers' default, is not supp"),
    ("mixtral", {"layer_types": ["chunked_attention"] * 3}, "layer_types = chunked_attention, chunked_attention, chunked_att"),
    ("gpt_neox", {"rms_norm_eps": 1e-2}, "rms_norm_eps = 0.01: is not a key that Trainshed or transformers know"),
    ("qwen3_5_text", {"full_attention_every": 2}, "full_attention_every = 2: is not a key that"),
    ("olmo_hybrid", {"full_attention_interval": 2, "num_attention_heads": 4}, "full_attention_interval = 2: is not a key"),
    ("deepseek_v3", {"head_dim": 2}, "head_dim = 2: is not qk_rope_head_dim, as in transformers; nearest valid: 64"),
    ("olmo3", {"rope_parameters": LOCAL}, "rope_parameters.sliding_attention.rope_theta = 10000.0: is not supported"),
    ("stablelm", {"use_parallel_residual": True}, "use_parallel_residual = true: is not supported"),
    ("stablelm", {"qk_layernorm": True}, "qk_layernorm = true: is not supported"),
    ("starcoder2", {"use_bias": False}, "use_bias = false: is not supported for starcoder2"),
    ("phi3", {"rope_scaling": {"type": "longrope"}}, "rope_scaling.rope_type = longrope: is not supported"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention = true: is not supported for gemma2"),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0: is not supported for gemma3"),
    ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0: is not supported for gemma3"),
    ("qwen3_5_text", {"layer_types": ["full_attention", *["linear_attention"] * 2]}, "is not a repetition of linear_attention"),
    ("qwen3_5", {}, "model_type = qwen3_5: is not a supported architecture"),
    ("qwen3_next", {"attn_output_gate": False}, "attn_output_gate = false: is not supported"),
    ("qwen3_next", {"mlp_only_layers": [0]}, "mlp_only_layers = [0]: is not supported"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mamba"}, "model_type = mamba: is not a supported architecture"),
        (
            {"model_type": "deepseek_v3", "scoring_func": "softmax"},
            "scoring_func = softmax: is not supported for deepseek_v3",
        ),
        ({"model_type": "dbrx", "emb_pdrop": 0.1}, "emb_pdrop = 0.1: is not supported for dbrx"),
        ({"model_type": "dbrx", "ffn_config": {"shared": 1}}, "shared = 1: is not a key"),
        ({"model_type": "dbrx", "ffn_config": {"ffn_act_fn": {"name": "silu", "beta": 2}}}, "has beta"),
        (
            {"model_type": "llama", "architectures": ["LlamaForTokenClassification"]},
            "architectures = LlamaForTokenClassification: is another model than llama",
        ),
        (
            {"model_type": "llama", "auto_map": {"AutoModelForCausalLM": "m.LlamaMoEForCausalLM"}},
            "auto_map.AutoModelForCausalLM = m.LlamaMoEForCausalLM: names code of another model",
        ),
        (
            {"model_type": "gpt2", "attention_head_type": "multiquery", "architectures": ["Custom"]},
            "attention_head_type = multiquery: is not supported for gpt; nearest valid: multihead",
        ),
        ({"model_type": "llama", "quantization_config": {"quant_method": "bitnet"}}, "quant_method = bitnet"),
        (
            {"model_type": "qwen3", "quantization_config": {"quant_method": "fp8"}},
            "quantization_config.weight_block_size = null: is not supported for float8 weights",
        ),
        ({"model_type": "mixtral", "num_experts": 4, "num_local_experts": 8}, "num_local_experts = 8"),
        ({"model_type": "gpt2", "hidden_size": 64, "n_embd": 32}, "n_embd = 32: is another name of a key"),
        ({"model_type": "qwen3", "layer_types": ["sliding_attention"]}, "layer_types = sliding_attention"),
        (
            {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0, "mrope_section": [1]}},
            "rope_scaling.mrope_section = [1]: is not known for rope_type linear",
        ),
        (
            {
                "model_type": "gpt_oss",
                "num_hidden_layers": 2,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            "layer_types = full_attention, sliding_attention: is not a repetition of sliding_attention",
        ),
        *(({"model_type": kind, "num_hidden_layers": 3, **keys}, message) for kind, keys, message in LACKING),
        ({"model_type": "llama", "attention_dropout": 0.1}, "attention_dropout = 0.1"),
        ({"model_type": "llama", "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type = dynamic"),
        ({"model_type": "gpt2", "attn_pdrop": 0.2}, "attn_pdrop and resid_pdrop must be equal"),
        (
            {"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True},
            "scale_attn_by_inverse_layer_idx = true",
        ),
    ],
)
def test_unsupported_config_json_is_rejected(config, message):
    with pytest.raises(ProfileError) as caught:
        from_config_json(config)
    assert message in str(caught.value)


def test_rope_parameters_that_are_empty_are_not_those_of_gpt_oss_by_default():
    config = to_config_json(Model(**EXPERTS, architecture="gpt_oss", sliding_window=128))
    config = {name: value for name, value in config.items() if not name.startswith("rope")}
    assert read(config).rope_scaling.rope_type == "yarn"
    assert read({**config, "rope_parameters": {}}).rope_scaling is None


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_phi3_keeps_its_window_whatever_layer_types_say(kind, caplog):
    """As in transformers, which does not read layer_types for it."""
    config = to_config_json(Model(**{**LLAMA, "architecture": "phi3", "sliding_window": 256}))
    assert read({**config, "layer_types": [kind] * 2}).sliding_window == 256
    assert ("layer_types: not used for phi3" in caplog.text) == (kind == "full_attention")


def test_mistral_with_kinds_of_layers_is_ministral():
    """As in transformers, and as Ministral 8B is published."""
    config = to_config_json(Model(**{**LLAMA, "architecture": "mistral", "sliding_window": 256}))
    model = read({**config, "layer_types": ["full_attention", "sliding_attention"]})
    assert (model.architecture, model.window(0), model.window(1)) == ("ministral", None, 256)
    assert read({**config, "layer_types": None}).architecture == "mistral"


def test_package_whose_family_is_broken_is_named_and_disturbs_no_other(tmp_path, monkeypatch):
    folder = tmp_path / "broken-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(
        "[trainshed.models]\nlost = no_such_module:FAMILY\nnumber = math:pi\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert "no_such_module:FAMILY cannot be imported" in rejection(LLAMA, architecture="lost")
    assert "math:pi is not a Family" in rejection(LLAMA, architecture="number")
    assert Model(**from_config_json(to_config_json(Model(**LLAMA)))) == Model(**LLAMA)
