"""Rules between sections: impossible profiles are rejected with the nearest valid choices."""

from collections.abc import Callable
from itertools import product

import pytest

from parallel.pipeline.schedules import SCHEDULES, check_microbatches, cut_layers
from profiles import resolve
from profiles.errors import ProfileError
from profiles.rules.cluster import time_limit_seconds
from tests.profiles.pair import PAIR
from tests.profiles.published import published


def rejection(*overrides) -> ProfileError:
    with pytest.raises(ProfileError) as caught:
        resolve.check(resolve.load(PAIR, overrides))
    return caught.value


def not_started(*overrides) -> ProfileError:
    """The error of starting a profile that can be planned."""
    accepted(*overrides)
    with pytest.raises(ProfileError) as caught:
        resolve.check_start(resolve.load(PAIR, overrides))
    return caught.value


def accepted(*overrides) -> None:
    resolve.check(resolve.load(PAIR, overrides))


def started(*overrides) -> None:
    accepted(*overrides)
    resolve.check_start(resolve.load(PAIR, overrides))


def test_profile_is_accepted_also_where_the_data_sets_the_number_of_traced_steps():
    accepted()
    accepted("train.steps=null", "train.epochs=1", "cluster.trace=[5,7]")


@pytest.mark.parametrize(
    ("time", "minutes"),
    [
        *(("5", 5), ("1:30", 2), ("1:30:00", 90), ("1-0", 1440), ("1-12:30", 2190), ("2-01:00:01", 2941)),
        ("0", 0),  # no limit
    ],
)
def test_time_limit_is_parsed_like_slurm(time, minutes):
    assert time_limit_seconds(time) == 60 * minutes
    accepted(f"cluster.time='{time}'", "cluster.time_left=119")


DATA_8 = ("parallel.tensor=1", "cluster.devices_per_node=8", "train.global_batch_size=32")
EIGHT_LAYERS = ("parallel.pipeline=2", "parallel.tensor=1", "model.num_hidden_layers=8")
ZERO_BUBBLE = (*EIGHT_LAYERS, "parallel.schedule=zero_bubble")
FP8 = ("train.precision=fp8", "model.head_dim=32")
H100 = (*FP8, "cluster.device=cuda", "cluster.accelerator=h100")
RECORDS = ("tokenizer.source=org/name",)
ONE = ("parallel.tensor=1", "cluster.devices_per_node=1", "train.micro_batch_size=1")


LINEAR = ("model.architecture=qwen3_5", "model.linear_num_key_heads=2", "model.linear_num_value_heads=2",
          "model.linear_key_head_dim=8", "model.linear_value_head_dim=8", "model.linear_conv_kernel_dim=4",
          "model.full_attention_every=2")  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "key", "value", "reason", "choices"),
    [
        (
            [*LINEAR, "parallel.tensor=4"],
            *("parallel.tensor", 4, "does not divide 2 key heads of linear attention, which are not", (2,)),
        ),
        (
            [*LINEAR, "train.precision=fp8"],
            *("train.precision", "fp8", "is not supported for model.architecture qwen3_5", ("bf16",)),
        ),
        ([*LINEAR, "lora.rank=4"], "lora.rank", 4, "which has linear attention", ("null",)),
        (
            [*LINEAR, "parallel.context=2", "cluster.devices_per_node=4", "train.sequence_length=8"],
            *(
                "train.sequence_length",
                8,
                "has parts of 2 tokens; the convolution of linear attention",
                (12,),
            ),
        ),
        (["parallel.tensor=3"], "parallel.tensor", 3, "does not divide 8 query heads", (2,)),
        (["parallel.tensor=16"], "parallel.tensor", 16, "does not divide 8 query heads", (2,)),
        (
            ["parallel.tensor=4", "model.num_attention_heads=24", "model.num_key_value_heads=6"],
            *("parallel.tensor", 4, "neither divides 6 KV heads nor is a multiple of them", (2,)),
        ),
        (
            ["parallel.tensor=4", "model.intermediate_size=510"],
            *("parallel.tensor", 4, "does not divide model.intermediate_size 510", (2,)),
        ),
        (
            ["train.precision=fp8"],
            *(
                "train.precision",
                "fp8",
                "fp8_recipe rowwise runs on h100 and h100_96 and h800 and h200 and b200, not on a cpu device",
                ("bf16",),
            ),
        ),
        (
            [*H100, "train.fp8_recipe=mxfp8"],
            *("train.precision", "fp8", "fp8_recipe mxfp8 runs on b200 and trn3, not on h100"),
            ("bf16", "train.fp8_recipe=tensorwise", "train.fp8_recipe=rowwise"),
        ),
        (
            [*H100, "parallel.tensor=1", "cluster.devices_per_node=1", "model.intermediate_size=504"],
            *("train.precision", "fp8", "needs multiples of 16 with fp8_recipe rowwise", ("bf16",)),
        ),
        (
            ["train.qk_clip=100", "model.architecture=qwen3"],
            *("train.qk_clip", 100.0, "queries and keys are normalized after their projections", ("null",)),
        ),
        (["train.qk_clip=100", "lora.rank=4"], "train.qk_clip", 100.0, "which LoRA freezes", ("null",)),
        (["continual.decay=0.1"], "continual.decay", 0.1, "continual.schedule is rewarm", ("null",)),
        (["continual.replay=[0.2, 0.1]"], "continual.replay", [0.2, 0.1], "increasing", ([0.1, 0.2],)),
        (["continual.include=mine"], "continual.include", "mine", "has no effect: no gate", ("null",)),
        (["continual.gates=[{on: olds}]"], "continual.gates.0.on", "olds", "is neither old, new", ()),
        (
            ["continual.gates=[{on: old}]"],
            *("continual.gates.0.on", "old", "has no limit; set one of rise_at_most", ()),
        ),
        (
            ["continual.gates=[{on: new, at_least: 0.5}]"],
            *(
                "continual.gates.0.at_least",
                0.5,
                "is a score of task:NAME",
                ("rise_at_most", "fall_at_least"),
            ),
        ),
        (
            ["continual.stand_in=[{kind: files}]"],
            *("continual.stand_in.0.path", None, "is missing: a source of kind files", ()),
        ),
        (
            [*DATA_8, "parallel.shard_degree=3"],
            *("parallel.shard_degree", 3, "does not divide data × context = 8 ranks", (2, 4)),
        ),
        (
            ["parallel.data_sharding=none", "parallel.shard_degree=1"],
            *("parallel.shard_degree", 1, "has no effect: parallel.data_sharding is none", ("null",)),
        ),
        (["parallel.keep_gathered=true"], "parallel.keep_gathered", True, "has no effect", (False,)),
        (
            ["compile.async_tensor=true"],
            *("compile.async_tensor", True, "needs compiled graphs on cuda", (False,)),
        ),
        (
            [
                "cluster.device=cuda",
                "compile.async_tensor=true",
                "parallel.tensor=2",
                "parallel.overlap_chunks=2",
            ],
            *("compile.async_tensor", True, "merges no products in chunks", (False,)),
        ),
        (
            ["parallel.tensor=1", "parallel.overlap_chunks=2"],
            *("parallel.overlap_chunks", 2, "has no effect without sequence parallelism", ("null",)),
        ),
        (
            ["compile.backend=eager"],
            "compile.backend",
            "eager",
            "does not support device cpu",
            ("inductor",),
        ),
        (["compile.flags=-O1"], "compile.flags", "-O1", "only applies to device neuron", ("null",)),
        (
            ["cluster.device=cuda", "compile.launcher=slurm"],
            *("compile.launcher", "slurm", "compiles on nodes without accelerators", ("local",)),
        ),
        (
            ["cluster.time=2"],
            "cluster.time_left",
            120,
            "leaves no time to train within cluster.time 2",
            (119,),
        ),
        (
            ["cluster.time=0-1:00", "cluster.time_left=9000"],
            *("cluster.time_left", 9000, "leaves no time to train within cluster.time 0-1:00", (3599,)),
        ),
        (["parallel.pipeline=4"], "parallel.pipeline", 4, "is more than the model's 3 layers", (1,)),
        (["parallel.pipeline_cuts=[1]"], "parallel.pipeline_cuts", [1], "takes 0 cuts", ("null",)),
        (
            ["parallel.pipeline=3", "parallel.pipeline_cuts=[2, 1]", "cluster.devices_per_node=6"],
            *("parallel.pipeline_cuts", [2, 1], "between 1 and 2", ("null with train.global_batch_size=12",)),
        ),
        (
            ["parallel.pipeline=2", "parallel.tensor=1", "parallel.schedule=interleaved"],
            *(
                "parallel.schedule",
                "interleaved",
                "4 are more than the model's 3 layers",
                ("1f1b", "zero_bubble"),
            ),
        ),
        (
            [*EIGHT_LAYERS, "parallel.schedule=interleaved", "parallel.pipeline_cuts=[2, 4]"],
            *("parallel.pipeline_cuts", [2, 4], "takes 3, 5, ... cuts", ("null",)),
        ),
        (
            [*ZERO_BUBBLE, "train.recompute=none", "cluster.device=neuron", "parallel.data_sharding=fsdp"],
            *("parallel.data_sharding", "fsdp", "compiled graphs on neuron", ("zero1", "none")),
        ),
        (
            [*ZERO_BUBBLE, "compile.enabled=false", "train.recompute=full"],
            *("train.recompute", "full", "zero_bubble", ("none",)),
        ),
        (
            [*EIGHT_LAYERS, "train.global_batch_size=4"],
            *("train.global_batch_size", 4, "makes 1 microbatches per step", (8,)),
        ),
        (
            [*EIGHT_LAYERS, "train.global_batch_size=20", "parallel.schedule=interleaved"],
            *("train.global_batch_size", 20, "makes 5 microbatches per step", (16, 24)),
        ),
        (
            ["parallel.context=2", "parallel.tensor=1", "train.sequence_length=250"],
            *("train.sequence_length", 250, "2 of 4 equal parts", (248, 252, "parallel.context=1")),
        ),
        (
            ["train.sequence_length=255", "train.micro_batch_size=1"],
            *("train.sequence_length", 255, "sequence parallelism", (254, 256)),
        ),
        (["cluster.devices_per_node=3"], "cluster.devices_per_node", 3, "tensor 2 × pipeline 1", (2, 4)),
        (["cluster.devices_per_node=1"], "cluster.devices_per_node", 1, "= 2", (2, "parallel.tensor=1")),
        (["parallel.pipeline=3"], "cluster.devices_per_node", 2, "= 6", ("parallel.pipeline=1",)),
        (["parallel.context=3"], "train.sequence_length", 256, "of 6 equal", ("parallel.context=1",)),
        (
            ["parallel.context=3", "train.warmup_steps=999"],
            *("train.sequence_length", 256, "of 6 equal"),
            ("parallel.context=1",),
        ),
        (["train.global_batch_size=10"], "train.global_batch_size", 10, "micro_batch_size 4 ×", (8, 12)),
        (
            ["cluster.devices_per_node=6", "train.micro_batch_size=1"],
            *("train.global_batch_size", 8, "data-parallel degree 3", (6, 9)),
        ),
        (
            ["train.recompute=[full, none]"],
            *("train.recompute", ["full", "none"], "has 2 entries; the pipeline has 1 stages", ("auto",)),
        ),
        (["train.warmup_steps=301"], "train.warmup_steps", 301, "train.steps 300", (300,)),
        (["train.constant_steps=290"], "train.constant_steps", 290, "train.steps 300", (270,)),
        (["train.minimum_rate_steps=290"], "train.minimum_rate_steps", 290, "train.steps 300", (270,)),
        (
            ["train.minimum_learning_rate=1.0"],
            *("train.minimum_learning_rate", 1.0, "above learning_rate 0.003", (0.003,)),
        ),
        (["tokenizer.vocabulary_size=5000"], "tokenizer.vocabulary_size", 5000, "vocab_size 4096", (4096,)),
        (["tokenizer.vocabulary_size=null"], "tokenizer.vocabulary_size", None, "is missing", (4096,)),
        (["cluster.nodes=2"], "cluster.nodes", 2, "one node", (1,)),
        (["cluster.devices_per_node=18"], "cluster.devices_per_node", 18, "more than 16 processes", (4,)),
        (
            ["train.steps=8", "train.warmup_steps=2", "cluster.trace=[20,22]"],
            *("cluster.trace", [20, 22], "begins after the last step, train.steps = 8", ([6, 8],)),
        ),
        (["data.sources.0={kind: files}"], "data.sources.0.path", None, "is missing", ()),
        (
            ["data.sources.0={kind: files, path: 'zip://*.txt::x.zip'}"],
            *("data.sources.0.path", "zip://*.txt::x.zip", "chains fsspec locations", ()),
        ),
        (
            ["data.sources.0.path=x.txt"],
            "data.sources.0.path",
            "x.txt",
            "does not apply to sources of kind python-docs",
            ("null", "data.sources.0.kind=files"),
        ),
        (
            [
                *("model.architecture=gpt", "model.num_key_value_heads=8", "model.hidden_act=gelu"),
                "model.max_position_embeddings=128",
            ],
            *("train.sequence_length", 256, "128 learned positions", (128,)),
        ),
        (
            ["model.max_position_embeddings=128"],
            *(
                "train.sequence_length",
                256,
                "set it to 256, and with pretrained weights model.rope_scaling",
                (128,),
            ),
        ),
        (["objective.kind=sft"], "tokenizer.source", "train", "name the tokenizer of the model", ()),
        (
            [*RECORDS, "objective.kind=sft", "continual.replay_from=generated"],
            *("continual.replay_from", "generated", "samples text", ("history",)),
        ),
        (
            ["continual.generated_tokens=9"],
            "continual.generated_tokens",
            9,
            "continual.replay_from is",
            ("null",),
        ),
        (["objective.beta=0.2"], "objective.beta", 0.2, "objective.kind is pretrain", (0.1,)),
        (
            [*RECORDS, "objective.kind=dpo", "objective.maximum_prompt_length=300"],
            *("objective.maximum_prompt_length", 300, "no room for an answer", (128,)),
        ),
        (
            ["lora.rank=8", "lora.targets=[qkv, q_proj]"],
            *("lora.targets", ["qkv", "q_proj"], "names q_proj twice", (["qkv"],)),
        ),
    ],
)
def test_impossible_values_are_rejected_with_nearest_valid_choices(overrides, key, value, reason, choices):
    error = rejection(*overrides)
    assert (error.key, error.value, error.choices) == (key, value, choices)
    assert reason in error.reason


PIPELINED = ("parallel.tensor=32", "parallel.pipeline=4", "parallel.data_sharding=zero1")


@pytest.mark.parametrize(
    ("name", "overrides", "choices"),
    [
        ("llama3-70b", [*PIPELINED, "cluster.nodes=7"], (4, 8, "parallel.pipeline=7")),
        (
            "llama3-70b",
            [*PIPELINED, "parallel.pipeline=7"],
            (7, 14, "parallel.pipeline=4", "parallel.pipeline=8"),
        ),
        ("llama3-70b", [*PIPELINED, "parallel.context=3"], ("parallel.context=2", "parallel.context=4")),
        ("llama3-70b", [*PIPELINED, "train.global_batch_size=6"], (16,)),
        (
            "llama3-70b",
            [*PIPELINED, "train.global_batch_size=1001", "train.micro_batch_size=2"],
            (1000, 1008),
        ),
        (published("deepseek-coder-1.3b-trn1"), ["parallel.pipeline=3"], None),
        (published("llama2-7b-trn1"), ["train.sequence_length=4095"], None),
        (published("gpt3-175b-trn1"), ["parallel.schedule=interleaved", "train.global_batch_size=60"], None),
        (PAIR, ["parallel.context=2", "parallel.tensor=1", "train.sequence_length=250"], None),
        (PAIR, [*EIGHT_LAYERS, "parallel.schedule=interleaved", "train.global_batch_size=20"], None),
        (PAIR, ["cluster.devices_per_node=15"], None),
        (PAIR, ["parallel.tensor=3"], (2,)),  # 4 needs more devices
    ],
)
def test_suggested_choices_for_cluster_and_batch_are_valid(name, overrides, choices):
    with pytest.raises(ProfileError) as caught:
        resolve.check(resolve.load(name, overrides))
    error = caught.value
    assert error.choices
    assert choices in (None, error.choices)
    for choice in error.choices:
        change = choice if isinstance(choice, str) else f"{error.key}={choice}"
        resolve.check(resolve.load(name, [*overrides, change]))


def test_changes_that_need_another_one_are_suggested_together():
    overrides = ("parallel.tensor=3", "cluster.devices_per_node=6")
    first, *_ = rejection(*overrides).choices
    assert first == "2 with train.global_batch_size=12"
    accepted(*overrides, "parallel.tensor=2", "train.global_batch_size=12")


def test_independent_errors_are_reported_together_each_with_its_reason():
    error = rejection("parallel.tensor=3", "train.warmup_steps=999", "tokenizer.vocabulary_size=9999")
    lines = str(error).splitlines()
    assert [line.partition(" = ")[0] for line in lines] == [
        "parallel.tensor",
        "also train.warmup_steps",
        "also tokenizer.vocabulary_size",
    ]
    assert all("nearest valid: " in line for line in lines)


def is_accepted(check: Callable[..., None], *arguments, error: type[Exception]) -> bool:
    try:
        check(*arguments)
    except error:
        return False
    return True


def test_pipelines_are_accepted_exactly_if_the_library_supports_them():
    found = set()
    cuts = (None, [1], [2], [5], [2, 1, 4], [1, 2, 4], [1, 2, 3, 4, 5])
    for schedule, ranks, layers, count, cut in product(SCHEDULES, (2, 3), (2, 5, 6), (1, 2, 3, 4, 5), cuts):

        def library(schedule=schedule, ranks=ranks, layers=layers, count=count, cut=cut) -> None:
            cut_layers([1.0] * layers, ranks, schedule, cut)
            check_microbatches(schedule, ranks, count)

        overrides = (
            *(
                f"parallel.schedule={schedule}",
                f"parallel.pipeline={ranks}",
                f"parallel.pipeline_cuts={cut or 'null'}",
            ),
            *("parallel.tensor=1", f"cluster.devices_per_node={ranks}", f"model.num_hidden_layers={layers}"),
            *("compile.enabled=false", f"train.global_batch_size={4 * count}"),
        )
        possible = is_accepted(library, error=ValueError)
        assert is_accepted(accepted, *overrides, error=ProfileError) == possible, overrides
        found.add((schedule, possible))
    assert len(found) == 2 * len(SCHEDULES)


def test_slurm_needs_sbatch_to_start_but_not_to_plan(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not_started("cluster.launcher=slurm", "cluster.nodes=2").choices == ("local",)
    (tmp_path / "sbatch").write_text("#!/bin/sh\n")
    (tmp_path / "sbatch").chmod(0o755)
    resolve.check_start(resolve.load(PAIR, ["cluster.launcher=slurm", "cluster.nodes=2"]))


def test_missing_files_stop_a_run_but_not_its_plan():
    error = not_started(
        "tokenizer.source=./nowhere", "init.from=/no/where", "data.sources.0={kind: files, path: ./none.txt}"
    )
    missing = {found.key: found.reason for found in (error, *error.others)}
    assert missing.keys() == {"tokenizer.source", "init.from", "data.sources.0.path"}
    assert "no such folder" in missing["init.from"]
    assert "no such file" in missing["data.sources.0.path"]
    assert "org/name" in not_started("tokenizer.source=gpt2").reason
    assert "no file matches" in not_started("data.sources.0={kind: files, path: './none-*.txt'}").reason


def test_planned_only_accelerator_can_be_planned_but_not_started():
    assert not_started("cluster.device=neuron", "cluster.accelerator=trn1").choices == ("trn2", "trn3")
    resolve.check_start(resolve.load(PAIR, ["cluster.device=neuron", "cluster.accelerator=trn2"]))


def test_fp8_is_accepted_on_gpus_and_planned_on_trn3():
    accepted(*H100)
    trn3 = (*FP8, "train.fp8_recipe=mxfp8", "cluster.device=neuron", "cluster.accelerator=trn3")
    assert not_started(*trn3).key == "train.precision"


def test_fine_tuning_is_planned_without_initial_weights_but_not_started():
    assert not_started(*RECORDS, "objective.kind=dpo").key == "init.from"
    assert not_started("lora.rank=8").key == "init.from"


def test_accelerator_must_match_the_device():
    assert rejection("cluster.accelerator=trn1").choices == ("null",)
    gpus = ("a100", "h100", "h100_96", "h800", "h200", "b200")
    assert rejection("cluster.device=cuda", "cluster.accelerator=trn1").choices == gpus
    accepted("cluster.device=neuron", "cluster.accelerator=trn1")


def test_sbatch_options_that_the_launcher_sets_are_rejected():
    accepted("cluster.slurm=[--gres=gpu:8, '--comment-file=a b', --overcommit]", "cluster.time=12:30:00")
    assert rejection("cluster.slurm=[--time=5]").choices == ("cluster.time",)
    assert rejection("cluster.slurm=[--wrap=id]").key == "cluster.slurm.0"


def test_existing_files_are_accepted(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    for path in (tmp_path, tmp_path / "a.txt", tmp_path / "*.txt"):
        started(f"data.sources.0={{kind: files, path: '{path}'}}")
    started(f"tokenizer.source={tmp_path}")


@pytest.mark.parametrize("source", ["org/name", "s3://bucket/folder"])
def test_hub_and_bucket_sources_are_not_checked_locally(source):
    started(f"tokenizer.source={source}", f"init.from={source}")
