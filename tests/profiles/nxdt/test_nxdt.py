"""Import of NxD Training configs: its 22 example configs, single keys, and what is rejected."""

import json
import math
from contextlib import suppress
from functools import cache, reduce
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import yaml
from hypothesis import strategies as st

from flows.cli.main import main
from modeling.planning.planner import plan
from profiles import nxdt, resolve
from profiles.errors import ProfileError
from profiles.files import yaml_text
from profiles.nxdt.rules import CALLBACK
from profiles.nxdt.translation import Effect
from tests.profiles.test_training import alone, losses, small

CONFIGS = yaml_text.parse(Path(__file__).with_name("nxdt_configs.yaml").read_text())
BASES = ("base", "hf", "hf_llama3", "megatron", "hf_llama3_8B_preferences")
NAMES = [name for name in CONFIGS if name not in BASES]

LLAMA3, MEGATRON = (
    {"model.vocab_size": 128256},
    {"train.minimum_learning_rate": 1e-5, "data.validation_fraction": 0.02},
)
COSINE = {"train.schedule": "cosine", "train.warmup_steps": 2000, "train.learning_rate": 1.5e-5}
ROPE31 = {"model.max_position_embeddings": 131072, "model.rope_scaling.rope_type": "llama3"}
EXPERTS = {"model.architecture": "mixtral", "model.num_experts": 8, "train.balance_coefficient": 0.02}
CAPACITY, DROPLESS = {**EXPERTS, "train.capacity_factor": 2.0}, {**EXPERTS, "train.capacity_factor": None}
SFT = {"objective.kind": "sft", "objective.packing": True, "objective.too_long": "drop"}
# Parameters; tensor, pipeline, context and data degrees; batch and sequence length; further values.
EXPECTED: dict[str, tuple[int, tuple[int, ...], tuple[int, int], dict[str, Any]]] = {
    "hf_llama3_8B": (8030261248, (32, 1, 1, 4), (1024, 8192), {**LLAMA3, "train.schedule": "linear"}),
    "hf_llama3_8B_trn2": (8030261248, (16, 1, 1, 4), (1024, 8192), {"cluster.accelerator": "trn2"}),
    "hf_llama3_70B": (70553706496, (32, 8, 1, 2), (1024, 8192), COSINE),
    "hf_llama3_70B_trn2": (
        *(70553706496, (32, 4, 1, 4), (1024, 8192)),
        {"parallel.pipeline_cuts": [19, 40, 61], "cluster.nodes": 8},
    ),
    "hf_llama3_70B_CP": (70553706496, (32, 8, 2, 1), (1024, 8192), COSINE),
    "hf_llama3.1_8B": (8030261248, (32, 1, 1, 32), (1024, 8192), ROPE31),
    "hf_llama3.1_70B": (70553706496, (32, 8, 1, 4), (1024, 8192), ROPE31),
    "hf_llama3.1_405B_trn1": (405853388800, (32, 32, 1, 2), (256, 8192), {"train.recompute": "full"}),
    "hf_llama_7B": (
        1071681536,
        (8, 1, 1, 4),
        (1024, 4096),
        {"model.vocab_size": 32000, "train.learning_rate": 3e-4},
    ),
    "megatron_gpt": (
        *(6658596864, (8, 1, 1, 4), (1024, 2048)),
        {
            "model.vocab_size": 50304,
            "tokenizer.vocabulary_size": 50257,
            "model.initializer_range": 0.021,
            "model.dropout": 0.1,
            "model.mlp_dropout": 0.1,
            "model.hidden_act": "gelu",
            "model.mlp_bias": True,
            "model.scaled_initialization": True,
            "model.tie_word_embeddings": True,
            "train.minimum_rate_steps": 9250,
            **MEGATRON,
        },
    ),
    "megatron_llama_7B": (
        6738415616,
        (8, 1, 1, 4),
        (1024, 4096),
        {"model.scaled_initialization": True, **MEGATRON},
    ),
    "megatron_llama_70b": (68976648192, (8, 16, 1, 2), (512, 4096), {"train.recompute": "full", **MEGATRON}),
    "megatron_mistral": (7241732096, (8, 1, 1, 4), (1024, 4096), {"model.sliding_window": 4096, **MEGATRON}),
    "hf_mixtral_8x7b": (46702792704, (32, 4, 1, 2), (128, 4096), CAPACITY),
    "hf_mixtral_8x7b_dropless": (46702792704, (32, 4, 1, 2), (128, 4096), DROPLESS),
    "megatron_mixtral_8x7b": (47508099072, (32, 4, 1, 4), (128, 4096), CAPACITY),
    "megatron_mixtral_8x7b_dropless": (47508099072, (32, 4, 1, 4), (128, 4096), DROPLESS),
    "hf_llama3_8B_SFT": (8030261248, (32, 1, 1, 1), (64, 4096), {**SFT, "init.from_": "/fsx/pretrained"}),
    "hf_llama3_8B_SFT_lora": (
        *(8030261248 + 5242880, (32, 1, 1, 1), (64, 4096)),
        {**SFT, "lora.rank": 16, "lora.alpha": 32.0, "lora.dropout": 0.05, "lora.targets": ["qkv"]}
        | {"parallel.data_sharding": "none"},
    ),
    "hf_llama3_8B_DPO": (
        *(8030261248, (32, 1, 1, 1), (4, 4096)),
        {"objective.kind": "dpo", "objective.beta": 0.01, "objective.loss": "sigmoid"}
        | {"objective.maximum_prompt_length": 2048, "objective.truncation": "keep_start"},
    ),
    "hf_llama3_8B_ORPO": (
        *(8030261248, (32, 1, 1, 1), (16, 4096)),
        {"objective.kind": "orpo", "objective.beta": 0.1, "train.learning_rate": 1.5e-4},
    ),
    "megatron_llama2_7B_SFT": (
        6738415616,
        (8, 1, 1, 4),
        (64, 4096),
        {**SFT, "train.minimum_learning_rate": 1e-5},
    ),
}


@cache
def config(name: str) -> dict[str, Any]:
    """A config, merged over what it extends."""
    values = dict(CONFIGS[name])
    base = values.pop("extends", None)
    return merged(config(base), values) if base else values


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    both = {key for key in over if isinstance(over[key], dict) and isinstance(base.get(key), dict)}
    return {**base, **over, **{key: merged(base[key], over[key]) for key in both}}


def write(folder: Path, name: str, over: dict[str, Any] | None = None) -> Path:
    """A config as a file, with changes."""
    path = folder / f"{name}_config.yaml"
    path.write_text(yaml.safe_dump(merged(config(name), over or {}), sort_keys=False))
    return path


def value(profile: Any, key: str) -> Any:
    for part in key.split("."):
        profile = getattr(profile, part)
    return profile


def sections(path: str, leaf: Any) -> dict[str, Any]:
    """{"a": {"b": leaf}} of "a.b"."""
    for part in reversed(path.split(".")):
        leaf = {part: leaf}
    return leaf


def nested(values: dict[str, Any]) -> dict[str, Any]:
    """Nested sections of values by dotted key."""
    return reduce(merged, (sections(*item) for item in values.items()), {})


def test_there_are_22_configs():
    assert len(NAMES) == 22
    assert set(NAMES) == set(EXPECTED)


@pytest.mark.parametrize("name", NAMES)
def test_config_is_imported_and_planned_and_trains_at_small_size(pool, tmp_path, name):
    parameters, degrees, (batch, sequence), values = EXPECTED[name]
    imported = nxdt.import_config(write(tmp_path, name))
    path = tmp_path / "profile.yaml"
    path.write_text(imported.text())
    profile = resolve.load(str(path))
    resolve.check(profile)
    planned = plan(profile)
    assert planned.parameters == parameters
    assert tuple(planned.mesh[axis] for axis in ("tensor", "pipeline", "context", "data")) == degrees
    assert (profile.train.global_batch_size, profile.train.sequence_length) == (batch, sequence)
    assert {key: value(profile, key) for key in values} == values
    reported = {line.key: line for line in imported.lines}
    assert reported.keys() == nxdt.read(write(tmp_path, name)).keys()
    assert all(line.note or line.ours for line in imported.lines)
    found = pool.run(losses, 1, profile=alone(small(str(path))))[0]
    assert math.isfinite(found[-1])
    assert found[-1] < found[0]


@pytest.mark.parametrize(
    ("name", "key", "given", "message"),
    [
        ("megatron_mixtral_8x7b", "model.moe.routing_algorithm", "sinkhorn", "routes differently"),
        ("megatron_mixtral_8x7b", "model.moe.frequency", 2, "experts in every layer"),
        ("megatron_gpt", "model.attention_dropout", 0.0, "differs from hidden_dropout 0.1"),
        ("megatron_llama_7B", "model.hidden_dropout", 0.1, "llama has no dropout"),
        ("megatron_llama_7B", "model.transformer_block_type", "post_ln", "is not supported"),
        ("megatron_llama_7B", "model.activation", "geglu", "with rmsnorm and rope has no equivalent"),
        ("megatron_llama_7B", "model.rotary_percentage", 0.5, "rotates all of a head"),
        ("megatron_llama_7B", "model.alibi", True, "is unknown to Trainshed and may change the model"),
        ("megatron_llama_7B", "data.eod_mask_loss", True, "the loss counts each document's EOS token"),
        ("megatron_llama_7B", "data.reset_position_ids", True, "resets positions and attention together"),
        ("megatron_llama_7B", "data.splits_string", "all", "is not a list of shares"),
        ("megatron_llama_7B", "data.data_prefix", [0.3, "/a", "/b"], "is not a list of weights and prefixes"),
        ("hf_llama3_8B_SFT_lora", "model_alignment_strategy.peft.lora_bias", "all", "trains no biases"),
        (
            "hf_llama3_8B_SFT_lora",
            "model_alignment_strategy.peft.target_modules",
            ["embed"],
            "is not one of qkv_proj",
        ),
        ("hf_llama3_8B_DPO", "model_alignment_strategy.dpo.loss_type", "robust", "Trainshed has sigmoid"),
        (
            "hf_llama3_8B",
            "model.optim.sched.name",
            "NoamAnnealing",
            "has no equivalent; Trainshed has CosineAnnealing",
        ),
        ("hf_llama3_8B", "model.optim.name", "lion", "has no equivalent"),
        ("hf_llama3_8B", "precision.type", "fp16", "has no equivalent"),
        ("hf_llama3_8B", "trainer.num_nodes", "${trainer.nodes}", "refers to an undefined key"),
        ("hf_llama3_8B", "trainer.num_nodes", "${trainer.num_nodes}", "refers to itself"),
        ("hf_llama3_8B", "trainer.num_nodes", "${trainer}", "refers to itself"),
        ("hf_llama3_8B", "trainer.max_steps", "many", "is not a number"),
        ("hf_llama3_8B", "trainer.max_steps", -1, "is unlimited"),
        ("hf_llama3_8B", "trainer.max_steps", "${add:2,3}", "calls an unknown function"),
        (
            "hf_llama3_8B",
            "model.optim.sched.constant_step",
            2,
            "did you mean model.optim.sched.constant_steps?",
        ),
        ("hf_llama3_8B", "model.hidden_size", 5000, "no published model has the dimensions"),
    ],
)
def test_mathematics_without_an_equivalent_is_rejected(tmp_path, name, key, given, message):
    with pytest.raises(ProfileError) as caught:
        nxdt.import_config(write(tmp_path, name, sections(key, given)))
    errors = [(error.key, str(error)) for error in (caught.value, *caught.value.others)]
    assert any(message in error for found, error in errors if found in (key, "model.model_config")), errors


def test_lora_of_experts_is_imported_where_it_is_equivalent(tmp_path):
    def imported(**peft: Any) -> nxdt.Imported:
        strategy = {"sft": {"packing": True}, "peft": {"lora_rank": 16, **peft}}
        return nxdt.import_config(write(tmp_path, "hf_mixtral_8x7b", {"model_alignment_strategy": strategy}))

    plain = imported(lora_dropout=0.0, target_modules=["qkv_proj", "gate_up_proj", "down_proj"])
    assert plain.values["lora"]["targets"] == ["qkv", "gate_up", "down_proj"]
    with pytest.raises(ProfileError, match=r"0.05 is not supported with down_proj of experts; set 0.0"):
        imported(target_modules=["qkv_proj", "down_proj"])
    with pytest.raises(ProfileError, match="up_proj of an expert is one product with the other half"):
        imported(lora_dropout=0.0, target_modules=["up_proj"])


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("megatron_llama_7B", {"data.data_prefix": [0.3, "/a", 0.7, "/b"]}, {"data.sources.1.weight": 0.7}),
        ("megatron_llama_7B", {"data.reset_position_ids": True, "data.reset_attention_mask": True},
         {"train.document_masks": True}),
        ("megatron_llama_7B", {"model.position_freq_base": 1e6}, {"model.rope_theta": 1e6}),
        ("megatron_llama_7B", {"model.positition_interpolation_factor": 4},
         {"model.rope_scaling.rope_type": "linear", "model.rope_scaling.factor": 4.0}),
        ("megatron_llama_7B", {"model.has_bias": True}, {"model.attention_bias": True, "model.mlp_bias": True}),
        ("megatron_llama_7B", {"model.vocab_size": 31999, "model.make_vocab_size_divisible_by": 128},
         {"model.vocab_size": 32768}),
        ("hf_llama3_8B", {"precision.type": "manual"}, {"train.precision": "bf16", "train.gradient_dtype": "bf16"}),
        ("megatron_llama_7B", {"precision.type": "manual"},
         {"train.precision": "float32", "train.gradient_dtype": "float32"}),
        ("megatron_llama_7B", {"precision.type": "manual", "precision.xla_downcast_bf16": "1"},
         {"train.precision": "bf16", "train.gradient_dtype": "bf16"}),
        ("hf_llama3_8B", {"precision.type": "mixed_precision_SR"},
         {"train.precision": "bf16", "train.gradient_dtype": "bf16"}),
        ("hf_llama3_8B", {"precision.fp32_grad_acc": False}, {"train.gradient_dtype": "float32"}),
        ("hf_llama3_8B", {"trainer.gradient_clip_val": None}, {"train.clip": None}),
        ("hf_llama3_8B", {"trainer.max_steps": -1, "trainer.max_epochs": 2}, {"train.epochs": 2, "train.steps": None}),
        ("hf_llama3_8B", {"distributed_strategy.virtual_pipeline_model_parallel_size": 2,
                          "distributed_strategy.pipeline_model_parallel_size": 4}, {"parallel.schedule": "interleaved"}),
        ("hf_llama3_70B", {"model.optim.sched.constant_steps": 1000}, {"train.minimum_rate_steps": 1000}),
        ("hf_llama3_70B", {"model.optim.sched.constant_steps": 1000, "trainer.max_steps": -1, "trainer.max_epochs": 1},
         {"train.minimum_rate_steps": 1000, "train.warmup_steps": 2000}),
        ("hf_llama3_70B", {"model.optim.sched.constant_steps": 950, "model.optim.sched.warmup_ratio": 0.1,
                           "model.optim.sched.warmup_steps": None, "trainer.max_steps": 1000},
         {"train.minimum_rate_steps": 900, "train.warmup_steps": 100}),
        ("hf_llama3_8B", {f"{CALLBACK}.save_top_k": 0}, {"checkpoint.every": 0, "checkpoint.keep": 3}),
        ("hf_llama3_8B", {f"{CALLBACK}.save_top_k": 0, f"{CALLBACK}.save_last": True},
         {"checkpoint.every": 500, "checkpoint.keep": 1}),
        ("hf_llama3_8B", {f"{CALLBACK}.save_top_k": -1}, {"checkpoint.every": 500, "checkpoint.keep": 0}),
        ("hf_llama3_8B_DPO", {}, {"data.prepend_bos": True}),
        ("hf_llama3_8B_ORPO", {}, {"data.prepend_bos": True}),
        ("hf_llama3_8B_SFT", {"model_alignment_strategy.sft.packing": False}, {"objective.too_long": "truncate"}),
        ("hf_llama3_8B_SFT", {"model_alignment_strategy.sft": {}}, {"objective.kind": "sft", "data.prepend_bos": True}),
        ("hf_llama3_8B_SFT", {"model_alignment_strategy": None, "data.alignment_strategy.sft.packing": True},
         {"objective.kind": "sft", "objective.packing": True}),
        ("hf_llama3_8B", {"trainer.max_steps": "500", "precision.fp32_grad_acc": "False"},
         {"train.steps": 500, "train.gradient_dtype": "float32"}),
        ("hf_llama3_8B_SFT", {}, {"init.from": "/fsx/pretrained", "init.nxd_layout": "trn1"}),
        ("hf_llama3_8B_trn2", {"trainer.num_nodes": 2}, {"cluster.nodes": 2, "cluster.devices_per_node": 64}),
        ("hf_mixtral_8x7b", {"model.moe.capacity_factor": 4.0}, {"train.capacity_factor": None}),
        ("hf_mixtral_8x7b", {"model.moe.output_router_logits": False}, {"train.balance": "none"}),
        ("hf_llama3_8B", {"model.num_layers": 2, "model.hidden_size": 4096, "model.ffn_hidden_size": 8192,
                          "model.num_attention_heads": 32, "model.vocab_size": 128256, "model.kv_channels": 256},
         {"model.head_dim": 256}),
    ],
)  # fmt: skip
def test_keys_are_translated_to_equivalent_settings(tmp_path, name, change, expected):
    path = tmp_path / "profile.yaml"
    path.write_text(nxdt.import_config(write(tmp_path, name, nested(change))).text())
    profile = resolve.load(str(path)).model_dump()
    for key, wanted in expected.items():
        found = profile
        for part in key.split("."):
            found = found[int(part)] if isinstance(found, list) else found[part]
        assert found == wanted, key


@pytest.mark.parametrize(
    ("name", "change", "key", "effect", "note"),
    [
        ("hf_llama3_8B", {"trainer.max_epochs": 2}, "trainer.max_epochs", Effect.DIFFERS, "stops after 2 epochs"),
        ("hf_llama3_8B", {"trainer.max_epochs": 2, "trainer.max_steps": -1}, "model.optim.sched.name", Effect.DIFFERS,
         "NxD Training's learning rate is constant"),
        ("hf_llama3_8B", {"trainer.max_epochs": 2, "trainer.max_steps": -1, "model.optim.sched.warmup_ratio": 0.1},
         "model.optim.sched.warmup_ratio", Effect.TO_DO, "set train.warmup_steps"),
        ("hf_llama3_8B", {"precision.type": "manual", "precision.xla_use_bf16": "1"}, "precision.xla_use_bf16",
         Effect.DIFFERS, "master weights included"),
        ("hf_llama3_8B", {"precision.type": "mixed_precision_SR"}, "precision.type", Effect.DIFFERS, "with this spelling"),
        ("hf_llama3_8B", {"precision.parallel_layers_reduce_dtype": "fp32"}, "precision.parallel_layers_reduce_dtype",
         Effect.DIFFERS, "sums over tensor ranks in float32"),
        ("hf_mixtral_8x7b", {"precision.parallel_layers_reduce_dtype": "fp32"}, "precision.parallel_layers_reduce_dtype",
         Effect.HARMLESS, "dtype of their activations"),
        ("hf_llama3_8B_DPO", {"model_alignment_strategy.dpo.loss_type": "ipo"}, "model_alignment_strategy.dpo.loss_type",
         Effect.DIFFERS, "set sigmoid to reproduce"),
        ("hf_llama3_8B_SFT_lora", {}, "distributed_strategy.zero1", Effect.DIFFERS, "without ZeRO-1"),
        ("megatron_gpt", {"exp_manager.resume_from_checkpoint": "/nxd"}, "exp_manager.resume_from_checkpoint",
         Effect.TO_DO, "NxD shards of gpt are not supported"),
    ],
)  # fmt: skip
def test_differences_are_reported(tmp_path, name, change, key, effect, note):
    imported = nxdt.import_config(write(tmp_path, name, nested(change)))
    [line] = [line for line in imported.lines if line.key == key]
    assert line.effect is effect
    assert note in line.note


def test_head_size_of_a_config_json_is_kept_unless_the_config_has_another_hidden_size(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps({"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "head_dim": 256})
    )
    for hidden_size, expected in ((None, 256), (4096, 256), (8192, None)):
        path = write(tmp_path, "hf_llama3_8B", {"model": {"hidden_size": hidden_size}})
        assert nxdt.import_config(path, config).values["model"].get("head_dim") == expected


def test_absent_keys_have_the_defaults_of_nxd_training(tmp_path):
    path = write(tmp_path, "hf_llama3_8B", {"trainer": {"max_epochs": 3}})
    values = yaml.safe_load(path.read_text())
    del values["trainer"]["max_steps"], values["model"]["optim"]["sched"]["max_steps"]
    del values["model"]["do_layer_norm_weight_decay"]
    path.write_text(yaml.safe_dump(values))
    imported = nxdt.import_config(path)
    train = imported.values["train"]
    assert train["epochs"] == 3
    assert "steps" not in train
    assert train["norm_weight_decay"]
    assert "decay norm weights by default" in imported.lines[-1].note


def test_references_to_sections_are_resolved(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        """
        base: {name: CosineAnnealing, warmup_steps: "${.first}", first: "${steps}"}
        steps: 5
        trainer: {devices: 1}
        model: {optim: {sched: "${base}", same: "${..other}"}, other: {a: 1}}
        length: ${model.optim.sched.warmup_steps}
        """
    )
    schedule = {"name": "CosineAnnealing", "warmup_steps": 5, "first": 5}
    model = {"optim": {"sched": schedule, "same": {"a": 1}}, "other": {"a": 1}}
    (tmp_path / "resolved.yaml").write_text(
        yaml.safe_dump({"base": schedule, "steps": 5, "trainer": {"devices": 1}, "model": model, "length": 5})
    )
    assert nxdt.read(path) == nxdt.read(tmp_path / "resolved.yaml")


ODD = (None, True, -1, 0, 0.5, 10**30, math.nan, math.inf, "text", "1e400", "'false'", "${no:1}", "${..up}",
       [], [1, "a"], [[1]], {}, {"a": 1})  # fmt: skip


@hypothesis.settings(max_examples=200)
@hypothesis.given(
    name=st.sampled_from(sorted(NAMES)), random=st.randoms(use_true_random=False), odd=st.sampled_from(ODD)
)
def test_odd_values_are_imported_or_rejected_as_such(name, random, odd, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp()
    key = random.choice(sorted(nxdt.read(write(folder, name))))
    with suppress(ProfileError):
        imported = nxdt.import_config(write(folder, name, sections(key, odd)))
        (folder / "odd.yaml").write_text(imported.text())
        resolve.load(str(folder / "odd.yaml"))


def test_published_model_is_marked_in_the_profile(tmp_path):
    imported = nxdt.import_config(write(tmp_path, "hf_llama_7B"))
    [line] = [line for line in imported.lines if line.key == "model.model_config"]
    assert line.effect is Effect.TO_DO
    assert "/fsx/config.json is not on this machine" in line.note
    assert "the published llama2-7b, which has hidden_size 4096, max_position_embeddings 4096" in line.note
    assert "but not num_hidden_layers 4" in line.note
    assert line.note in imported.text()
    assert resolve.load("llama2-7b").tokenizer.source == imported.values["tokenizer"]["source"]


def test_kv_replicator_decides_the_kv_heads_and_is_checked(tmp_path):
    own = {"ffn_hidden_size": 14336, "num_attention_heads": 32, "vocab_size": 128256}
    model = nxdt.import_config(write(tmp_path, "hf_llama3_8B", {"model": own})).values["model"]
    assert model["num_key_value_heads"] == 8
    over = {"model": {**own, "num_kv_heads": 8}, "distributed_strategy": {"kv_replicator": 2}}
    with pytest.raises(
        ProfileError, match="kv_replicator = 2: makes 16 of 8 KV heads, which 32 tensor ranks do not divide"
    ):
        nxdt.import_config(write(tmp_path, "hf_llama3_8B", over))


def test_several_models_of_the_same_numbers_are_named(tmp_path):
    unknown = {"rope_theta": None, "max_position_embeddings": None}
    over = {"model": unknown, "data": {"train_dir": "/fsx/text"}}
    with pytest.raises(
        ProfileError, match=r"llama3-8b and llama3\.1-8b has the dimensions.*pass --config FILE"
    ):
        nxdt.import_config(write(tmp_path, "hf_llama3_8B", over))


def test_vocabulary_is_counted_in_files_of_this_machine(tmp_path):
    (tmp_path / "vocab.json").write_text(json.dumps({f"token {number}": number for number in range(1000)}))
    (tmp_path / "merges.txt").write_text("")
    files = {"vocab_file": str(tmp_path / "vocab.json"), "merge_file": str(tmp_path / "merges.txt")}
    values = nxdt.import_config(write(tmp_path, "megatron_gpt", {"data": {"tokenizer": files}})).values
    assert (values["model"]["vocab_size"], values["tokenizer"]["vocabulary_size"]) == (1024, 1000)
    assert values["tokenizer"]["source"] == str(tmp_path)


def test_command_writes_the_profile_and_ends_with_its_plan(tmp_path, capsys):
    out = tmp_path / "mine.yaml"
    assert main(["import-config", str(write(tmp_path, "hf_llama_7B")), str(out)]) == 0
    shown = capsys.readouterr().out
    text = " ".join(shown.split())
    assert shown.index("keys: ") < shown.index("differs") < shown.index("to do") < shown.index("wrote ")
    assert "log_gradient_norm" not in text
    assert "parameters 1,071,681,536" in text
    assert "cannot start it here: - cluster.accelerator = trn1" in text
    assert "data.sources.0.path = /fsx/wikicorpus_llama2_4k: there is no such file or folder" in text
    assert main(["import-config", str(write(tmp_path, "hf_llama_7B")), str(out)]) == 2
    assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({"train": {}, "cluster": {}}, "is a profile of Trainshed already"),
        ({"architectures": ["LlamaForCausalLM"], "rope_theta": 1}, "is a model's config.json; name the NxD"),
        (
            {"seed": "${undefined}"},
            "is not a config of NxD Training, which has the sections distributed_strategy",
        ),
    ],
)
def test_another_file_is_rejected_by_its_kind(tmp_path, values, kind):
    path = tmp_path / "other.yaml"
    path.write_text(yaml.safe_dump(values))
    with pytest.raises(ProfileError, match=kind):
        nxdt.import_config(path)


def test_profile_is_named_after_the_file_of_its_config(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("hf_llama3_8B", "hf_llama3.1_8B"):  # their key `name` is the same
        assert main(["import-config", str(write(tmp_path, name, {"name": "hf_llama"}))]) == 0
        assert f"wrote {name}.yaml" in capsys.readouterr().out
        assert resolve.load(f"./{name}.yaml").name == name


def test_hardware_plans_a_new_topology_and_keeps_the_mathematics(tmp_path, capsys):
    theirs, ours = tmp_path / "theirs.yaml", tmp_path / "ours.yaml"
    config = str(write(tmp_path, "hf_llama_7B"))
    assert main(["import-config", config, str(theirs)]) == 0
    capsys.readouterr()
    assert main(["import-config", config, str(ours), "--hardware", "h200", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["plan"]["fits"]
    assert {line["key"] for line in result["keys"]} == nxdt.read(Path(config)).keys()
    before, after = resolve.load(str(theirs)), resolve.load(str(ours))
    assert (after.cluster.accelerator, after.cluster.devices_per_node) == ("h200", 8)
    assert after.parallel.tensor < before.parallel.tensor
    assert after.model == before.model
    mathematics = [each.train.model_dump(exclude={"recompute"}) for each in (before, after)]
    assert mathematics[0] == mathematics[1]


def test_error_leaves_nothing_behind(tmp_path, capsys):
    over = {"model": {"alibi": True}, "data": {"eod_mask_loss": True}}
    config = write(tmp_path, "megatron_llama_7B", over)
    assert main(["import-config", str(config), str(tmp_path / "mine.yaml")]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    for part in ("data.eod_mask_loss = true", "also model.alibi = true"):
        assert part in shown.err
    assert list(tmp_path.glob("*.yaml")) == [config]
