"""Training on an emulated accelerator (no hardware): the CPU's losses, one host sync per step."""

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from modeling.training.trainer import timeouts_of
from profiles.resolve import load
from tests.emulation import usage
from tests.emulation.program import FAULTS, SLOW_SECONDS
from tests.forked_jobs import run_forked
from tests.modeling import micro
from tests.profiles.pair import PAIR

SECONDS = 1800  # that a fixture of compiled runs may take on a busy machine
pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS)]

STEPS, PASSES = 3, 2  # of an evaluation
STEPS_OF_TRAINING = ("train", "slow", "steps")
SETTINGS = (
    *(f"train.steps={STEPS}", "train.spike_factor=2.0", "evaluate.every=3", "checkpoint.every=2"),
    "train.check_replicas_every=2",
    *("model.num_attention_heads=4", "model.num_key_value_heads=2"),
    "model.vocab_size=163",  # so that buckets have gaps
)
GPT = (
    *("model.architecture=gpt", "model.num_key_value_heads=4", "model.dropout=0.1", "model.hidden_act=gelu"),
    *("model.tie_word_embeddings=true", "model.attention_bias=true", "model.mlp_bias=true"),
)
PIPELINE = ("parallel.tensor=1", "parallel.pipeline=2", "train.micro_batch_size=1")
CLIP = "train.qk_clip=0.02"
DOCUMENTS = "train.document_masks=true"
MASKED = (DOCUMENTS, CLIP)
TWO_RANKS = {
    "tensor": ("parallel.tensor=2", "parallel.overlap_chunks=2"),
    "data": ("parallel.tensor=1", "checkpoint.async=true"),
    "fsdp": ("parallel.tensor=1", "parallel.data_sharding=fsdp", "train.recompute=full"),
    "context": ("parallel.tensor=1", "parallel.context=2", *MASKED),
    "bounds": ("parallel.tensor=2", *MASKED),
    "pipeline": PIPELINE,
    "dropout": (*GPT, *PIPELINE, "parallel.schedule=zero_bubble"),
}
DEEP = ("model.num_hidden_layers=4",)
MUON = ("train.optimizer=muon", CLIP)
EXPERTS = ("model.architecture=mixtral", "model.num_experts=4", "model.num_experts_per_tok=2", *MUON)
BF16 = ("train.precision=bf16", *MUON)
SFT = ("objective.kind=sft", "objective.packing=true")
DPO = ("objective.kind=dpo", "objective.packing=false", *MUON)
ADAPTERS = (*SFT, "lora.rank=4", "lora.targets=[q_proj, v_proj, output, gate_up, down]")
TENSOR, USERS = "compiled, tensor", "compiled, user loss"
SHARDED_ADAPTERS = "compiled, sft, lora, fsdp"
COMPILED = {
    TENSOR: (
        *(*BF16, "parallel.tensor=2", "train.micro_batch_size=1", "train.recompute=full 1"),
        "evaluate.metrics=[tests.emulation.user_functions:accuracy]",
    ),
    "compiled, dpo, zero bubble": (*DPO, *PIPELINE, "parallel.schedule=zero_bubble"),
    # with dropout, with tied embeddings, whose gradient the user's loss adds to, and with parameters of more shapes than torch
    # recompiles for by default
    USERS: (*GPT, "parallel.tensor=2", "train.loss=tests.emulation.user_functions:cross_entropy"),
    # in microbatches, with room for every row, and in a ring with documents
    "compiled, experts, bounds": (
        *(*EXPERTS, "parallel.tensor=1", "parallel.context=2", "parallel.expert=2", DOCUMENTS),
        *("train.capacity_factor=2.0", "train.micro_batch_size=1", "train.recompute=selective"),
    ),
    SHARDED_ADAPTERS: (
        *(*ADAPTERS, "parallel.tensor=1", "parallel.data_sharding=fsdp"),
        "train.micro_batch_size=1",
    ),
}
# Functions that copy to the device before the first step: constants, and initial or loaded weights.
SETUP = {
    "modeling/models/families/llama.py:Llama.__init__",
    "modeling/models/language_model.py:LanguageModel.__init__",
    "modeling/training/anomalies.py:AnomalyGuard.__init__",
    "modeling/training/trainer.py:Trainer.__init__",
    "parallel/checkpoint/reader.py:Reader.load.<locals>.copy",
    "parallel/initialization.py:_Drawn.fill",
    "parallel/layers/linear.py:VocabParallelEmbedding.__init__",
    "parallel/optimizer/adamw.py:AdamW.constants",
    "parallel/optimizer/buckets.py:Bucket._norm_weights",
    "parallel/optimizer/replicas.py:_checksum_weights",
    "parallel/optimizer/sharded_adamw.py:_chosen",
}
# Further ones, before it.
BUILD = {
    "modeling/models/families/gpt.py:Attention.__init__",
    "modeling/models/families/gpt.py:MLP.__init__",
    "modeling/models/lora.py:_update",
    "parallel/attention/maxima.py:ScoreMaxima.__init__",
    "parallel/initialization.py:Constant.fill",
    "parallel/initialization.py:initialize",
    "parallel/layers/lora.py:keep_sections_apart",
    "parallel/optimizer/buckets.py:Bucket._allocate_states",
    "parallel/optimizer/buckets.py:Bucket._hold",
    "parallel/optimizer/replicas.py:ReplicaCheck.__init__",
    "parallel/optimizer/sharded_adamw.py:ShardedAdamW.__init__",
}
# Of what torch's all-reduce reads, which need no program.
COPIES = {
    "parallel/collectives.py:PendingAllReduce.__init__ copy_",
    "parallel/collectives.py:all_reduce_max copy_",
}
# Pipelines agree once, before their first pass, that their shapes are known.
AGREEMENT = {"parallel/pipeline/runtime.py:LowMemoryStage._warmup_forward_vote"}
RESUMED = ("tensor", "fsdp", "pipeline")
FOUR_RANKS = {
    "tensor 4": ("parallel.tensor=4",),  # with replicated KV heads
    "tensor 2, pipeline 2": (*PIPELINE, "parallel.tensor=2"),
}
HSDP = "compiled, hsdp"
SHARDED_TWICE = (
    "parallel.tensor=1",
    "parallel.data_sharding=fsdp",
    "parallel.shard_degree=2",
    "train.recompute=selective",
    "train.micro_batch_size=1",
)
EAGER_EXPERTS, COMPILED_EXPERTS = "gpu, experts", "gpu, experts, compiled"
# On the paths for GPUs.
GPU = {
    "gpu, ring": ("parallel.tensor=1", "parallel.context=2", *MASKED),
    "gpu, fsdp": ("parallel.tensor=1", "parallel.data_sharding=fsdp", "compile.enabled=true"),
    "gpu, pipeline": (*DEEP, *PIPELINE, "parallel.schedule=interleaved", "compile.enabled=true"),
    EAGER_EXPERTS: (*EXPERTS, "parallel.tensor=1", "parallel.expert=2", "train.recompute=full"),
    COMPILED_EXPERTS: (
        *(*EXPERTS, "parallel.tensor=1", "parallel.expert=2", "train.recompute=full 1"),
        *("train.micro_batch_size=1", "compile.enabled=true"),
    ),
    "gpu, compiled": ("parallel.tensor=2", "compile.enabled=true", "parallel.overlap_chunks=2"),
}
COMPILE = ("compile.enabled=true", "evaluate.every=0", "checkpoint.every=0")


@pytest.fixture(scope="module")
def datasets(tmp_path_factory) -> dict[tuple[str, ...], Path]:
    """Datasets by the settings of the objective."""
    folders = [tmp_path_factory.mktemp(name) for name in ("text", "records", "pairs")]
    found = {(): micro.dataset(folders[0]), SFT: micro.records(folders[1])}
    return found | {objective(DPO): micro.records(folders[2], pairs=True)}


def start_runs(
    folder: Path, datasets: dict[tuple[str, ...], Path], runs: dict[str, dict], ranks: int
) -> dict[str, Path]:
    """Run a job on the emulated device. Returns the run folders by name."""
    folders, job = {}, []
    for name, entry in runs.items():
        settings = (
            *SETTINGS,
            *(own := entry.pop("settings")),
            f"cluster.devices_per_node={ranks}",
            "cluster.device=neuron",
        )
        folders[name] = micro.run_folder(folder / name.replace(" ", "_"), *settings)
        if weights := entry.pop("weights", None):
            (folders[name] / "weights").symlink_to(weights)
        if (compiled := ahead(name)) in runs:
            (folders[name] / "ahead").symlink_to(folders[compiled] / "ahead")
        kernel = "bounds" if "bounds" in name else None
        job.append(
            {"run": str(folders[name]), "dataset": str(datasets[objective(own)]), "kernel": kernel, **entry}
        )
    (folder / "job.json").write_text(json.dumps(job))
    code, output = run_forked("tests.emulation.program", [folder / "job.json"], ranks, SECONDS)
    assert code == 0, output[-4000:]
    return folders


def ahead(name: str) -> str:
    """Name of the entry that compiles a run's programs ahead of it."""
    return f"ahead of {name}"


def calls(run: Path, rank: int = 0) -> list[dict]:
    """What each call of a run returned and did on a rank's device."""
    return json.loads((run / f"calls_{rank}.json").read_text())


def training(run: Path, rank: int = 0) -> dict[str, dict[str, int]]:
    """What a run's training did on a rank's device."""
    return next(call["usage"] for call in calls(run, rank) if call["name"] in STEPS_OF_TRAINING)


@pytest.fixture(scope="module")
def cpu_runs(tmp_path_factory, datasets) -> dict[tuple[str, ...], Path]:
    """Runs of one process on the CPU, by the settings that change their losses; the first is evaluated."""
    runs = {}
    for number, settings in enumerate(
        ((), GPT, DEEP, EXPERTS, (*EXPERTS, DOCUMENTS), BF16, DPO, ADAPTERS, MASKED)
    ):
        run = micro.run_folder(
            tmp_path_factory.mktemp(f"cpu{number}"), *SETTINGS, *settings, "parallel.tensor=1", "cluster.devices_per_node=1"
        )  # fmt: skip
        dataset = datasets[objective(settings)]
        given = ["--reference", dataset] if settings == DPO else []
        given += ["--weights", base_weights(runs)] if settings == ADAPTERS else []
        micro.run("training.train", "--run-folder", run, "--dataset", dataset, *given, processes=0)
        runs[settings] = run
    evaluation = (
        "--run-folder",
        runs[()],
        "--dataset",
        datasets[()],
        "--output",
        runs[()] / "evaluation.json",
    )
    micro.run("training.evaluate", *evaluation, processes=0)
    return runs


@pytest.fixture(scope="module")
def expected(cpu_runs) -> dict[tuple[str, ...], dict[str, float]]:
    """Results of one process on the CPU, by the settings that change them."""
    return {settings: results(run) for settings, run in cpu_runs.items()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, datasets) -> dict[str, Path]:
    """Finished runs: each topology of two ranks, one resumed and evaluated; and one run for each fault."""
    entries = {name: {"settings": settings, "calls": ["train"]} for name, settings in TWO_RANKS.items()}
    entries |= {
        name: {"settings": settings, "calls": ["train"], "gpu": True} for name, settings in GPU.items()
    }
    entries["data"]["calls"] = ["slow"]
    entries["tensor"]["calls"] = ["check_device", "train", "evaluate", "resume"]
    for name in RESUMED[1:]:
        entries[name]["calls"] = ["train", "evaluate", "resume"]
    for fault in FAULTS:
        gpu = "chunk" in fault  # in an operator of compiled blocks
        settings = ("train.steps=2", *(GPU["gpu, compiled"] if gpu else TWO_RANKS["tensor"]))
        entries[fault] = {"settings": settings, "calls": ["train"], "fault": fault, "gpu": gpu}
    return start_runs(tmp_path_factory.mktemp("two"), datasets, entries, 2)


@pytest.fixture(scope="module")
def compiled_runs(tmp_path_factory, datasets, cpu_runs) -> dict[str, Path]:
    compiled_ahead = {
        ahead(name): {"settings": (*settings, *COMPILE), "calls": ["compile"]}
        for name, settings in COMPILED.items()
    }
    entries = {
        name: {"settings": (*settings, *COMPILE), "calls": ["steps"]} for name, settings in COMPILED.items()
    }
    for name in (TENSOR, USERS):
        entries[name]["settings"] += (f"checkpoint.every={STEPS}",)
        entries[name]["calls"].append("evaluate")
    entries[SHARDED_ADAPTERS]["weights"] = base_weights(cpu_runs)
    entries = compiled_ahead | entries
    return start_runs(tmp_path_factory.mktemp("compiled"), datasets, entries, 2)


@pytest.fixture(scope="module")
def larger_runs(tmp_path_factory, datasets) -> dict[str, Path]:
    entries = {name: {"settings": settings, "calls": ["train"]} for name, settings in FOUR_RANKS.items()}
    entries[HSDP] = {"settings": (*SHARDED_TWICE, *COMPILE), "calls": ["steps"]}
    return start_runs(tmp_path_factory.mktemp("four"), datasets, entries, 4)


def base_weights(cpu_runs: dict[tuple[str, ...], Path]) -> Path:
    """The checkpoint that adapters are trained on."""
    return cpu_runs[()] / "checkpoints" / f"step_{STEPS}"


def mathematics(settings: tuple[str, ...]) -> tuple[str, ...]:
    """The settings that change losses."""
    models = (GPT, DEEP, EXPERTS, BF16, DPO, ADAPTERS)
    model = next((each for each in models if settings[: len(each)] == each), ())
    return *model, *(each for each in MASKED if each in settings and each not in model)


def results(run: Path) -> dict[str, float]:
    """The loss of each step, and with QK-clip the largest logit and the number of clipped heads."""
    names = ("loss", "max_logit", "clipped_heads")
    rows = [row for row in micro.metrics(run) if "loss" in row]
    return {f"{name} {row['step']}": row[name] for row in rows for name in names if name in row}


def objective(settings: tuple[str, ...]) -> tuple[str, ...]:
    """The settings of a run's objective."""
    return tuple(setting for setting in settings if setting.startswith("objective."))


@pytest.mark.parametrize("name", [*TWO_RANKS, *GPU])
def test_losses_are_those_of_the_cpu(name, runs, expected):
    settings = (TWO_RANKS | GPU)[name]
    assert results(runs[name]) == pytest.approx(expected[mathematics(settings)], rel=1e-5)


@pytest.mark.parametrize("name", [*COMPILED, HSDP])
def test_compiled_step_runs_no_operator_outside_compiled_programs(name, compiled_runs, larger_runs, expected):
    """On any rank; torch's all-reduce copies its input, which needs no program."""
    run, steps = (compiled_runs | larger_runs)[name], STEPS - 1  # that are counted
    settings = COMPILED.get(name, SHARDED_TWICE)
    tolerance = 2e-2 if BF16[0] in settings else 1e-5
    found = results(run)
    assert found == pytest.approx(expected[mathematics(settings)], rel=tolerance)
    assert (found.get("clipped_heads 1", 0) > 0) == (CLIP in settings)
    for rank in range(4 if name == HSDP else 2):
        outside = training(run, rank).get(usage.EAGER, {})
        assert set(outside) <= COPIES
        assert usage.BLOCKING_UPLOAD not in training(run, rank)
        assert training(run, rank)[usage.HOST_READ] == {"parallel/device.py:Download.wait event": steps}
        call = calls(run, rank)[0]
        buckets, programs = call["returned"]["buckets"], training(run, rank)[usage.PROGRAM]
        assert programs["parallel/optimizer/adamw.py:update"] == steps * buckets["AdamW"]
        matrices = buckets.get("Muon", 0)
        assert (matrices > 0) == (MUON[0] in settings)
        for function in ("accelerate", "place"):
            assert programs.get(f"parallel/optimizer/muon.py:{function}", 0) == steps * matrices
        # Saves a checkpoint, in runs that do.
        assert set(call["returned"]["after"]) <= COPIES
        # The device reads its settings once: the cache of compiled programs must be set before it is used.
        cache = run / "graphs" / ("ahead" if name in COMPILED else f"own-{torch.__version__}")
        assert call["settings"] == {"TORCH_NEURONX_NEFF_CACHE_DIR": str(cache)}


@pytest.mark.parametrize("name", COMPILED)
def test_run_compiles_nothing_after_a_machine_without_the_device_has_compiled_it(name, compiled_runs):
    """One process compiles without the device; each rank's programs have the same digests with it."""
    run, (compiled,) = compiled_runs[name], calls(compiled_runs[ahead(name)])
    for rank in range(2):
        returned = calls(run, rank)[0]["returned"]
        assert returned["programs"] == compiled["returned"]
        # A region with another variable's name is traced, and has an equal program; the others are in the manifest.
        assert returned["traced"] < len(compiled["returned"]) / 5
    rows = micro.metrics(run)
    assert {row["graph_cache_misses"] for row in rows} == {0}
    assert rows[-1]["graph_cache_hits"] > 0
    assert not (run / "events.jsonl").exists()


@pytest.mark.parametrize("name", [TENSOR, USERS])
def test_compiled_evaluation_and_sampling_run_no_operator_outside_compiled_programs(name, compiled_runs):
    """And no program that was not compiled ahead; with a user's metric, and with a user's loss."""
    evaluated, (compiled,) = calls(compiled_runs[name])[1], calls(compiled_runs[ahead(name)])
    assert evaluated["returned"] == compiled["returned"]
    assert functions(evaluated["usage"][usage.EAGER]) <= SETUP | BUILD


def test_compiled_evaluation_before_training_runs_no_operator_outside_compiled_programs(compiled_runs):
    """Of the weights that adapters are trained on, without a metric."""
    assert "validation_loss" in micro.metrics(compiled_runs[SHARDED_ADAPTERS])[0]
    for rank in range(2):
        before = calls(compiled_runs[SHARDED_ADAPTERS], rank)[0]["returned"]["before"]
        assert before
        assert functions(before.keys() - COPIES) <= SETUP | BUILD


@pytest.mark.parametrize("name", FOUR_RANKS)
def test_losses_on_four_ranks_are_those_of_the_cpu(name, larger_runs, expected):
    assert results(larger_runs[name]) == pytest.approx(expected[()], rel=1e-5)


@pytest.mark.parametrize("name", [*TWO_RANKS, *GPU])
def test_step_waits_for_the_device_once(name, runs):
    """With a replica check; besides saves, evaluation and the pipelines' agreement before the first step."""
    used, settings = training(runs[name]), (TWO_RANKS | GPU)[name]
    waits = used[usage.HOST_READ]
    expected = {
        "parallel/device.py:Download.wait event": STEPS + PASSES,
    }
    if "parallel.pipeline=2" in settings:
        stages = 2 if "parallel.schedule=interleaved" in settings else 1  # of a rank
        expected["parallel/pipeline/pipeline.py:Pipeline._run _local_scalar_dense"] = stages
    if name in (EAGER_EXPERTS, COMPILED_EXPERTS):
        # Each of two layers waits for the numbers of rows that it exchanges, in each microbatch, but not when it is recomputed.
        profile = load(str(runs[name] / "profile.yaml"))
        rows = profile.train.global_batch_size // 2 * (STEPS + PASSES)
        expected["parallel/device.py:Download.wait event"] += 2 * rows // profile.train.micro_batch_size
    excluded = (
        "parallel/checkpoint",
        "modeling/training/recovery/checkpoints",
        "modeling/training/recovery/replicas.py:Replicas.synchronize",
        "parallel/experts/exchange.py:Exchange.ranges",  # without grouped products, which the emulation lacks
    )
    assert {site: count for site, count in waits.items() if not site.startswith(excluded)} == expected
    assert usage.DYNAMIC not in used


@pytest.mark.parametrize("name", [*TWO_RANKS, *COMPILED])
def test_next_step_is_queued_before_a_step_is_waited_for(name, runs, compiled_runs):
    run = runs[name] if name in TWO_RANKS else compiled_runs[name]
    for rank in range(2):
        order = next(call["order"] for call in calls(run, rank) if call["name"] in STEPS_OF_TRAINING)
        order = order[order.index("queue") :]  # after the evaluation of initial weights
        assert order[:3] == ["queue", "queue", "wait"]


def test_copies_of_weights_that_are_equal_are_not_reported(runs, larger_runs):
    for run in (*(runs[name] for name in TWO_RANKS), *larger_runs.values()):
        events = (run / "events.jsonl").read_text() if (run / "events.jsonl").exists() else ""
        assert "replicas differ" not in events


@pytest.mark.parametrize("name", TWO_RANKS)
def test_copies_to_the_device_are_asynchronous_and_of_page_locked_memory(name, runs):
    """In steps and evaluations, besides the pipelines' agreement; dropout keys only if there is dropout."""
    used = training(runs[name])
    agreements = used[usage.BLOCKING_UPLOAD].pop(
        "parallel/pipeline/runtime.py:LowMemoryStage._warmup_forward_vote torch.int32", 0
    )
    assert agreements == (1 if "parallel.pipeline=2" in TWO_RANKS[name] else 0)
    assert blocking_functions(used) <= SETUP
    hashed = any(site.startswith("parallel/random.py") for site in used[usage.EAGER])
    assert hashed == (name == "dropout")


def blocking_functions(used: dict[str, dict[str, int]]) -> set[str]:
    """Functions, with their files, whose copies to the device make the host wait."""
    return functions(used[usage.BLOCKING_UPLOAD])


def functions(sites: Iterable[str]) -> set[str]:
    """The functions, with their files, of call sites."""
    return {site.split()[0] for site in sites}


def test_every_process_group_is_used_and_has_the_timeout_of_the_run(runs, larger_runs):
    for run in (*(runs[name] for name in TWO_RANKS), *larger_runs.values()):
        groups = next(call["groups"] for call in calls(run) if call["name"] in STEPS_OF_TRAINING)
        timeout = timeouts_of(load(str(run / "profile.yaml"))).process_group.total_seconds()
        assert groups
        assert {(used, seconds) for _, used, seconds in groups} == {(True, timeout)}


def test_rank_whose_device_is_slow_is_named_though_its_host_is_not(runs):
    events = [json.loads(line) for line in (runs["data"] / "events.jsonl").read_text().splitlines()]
    (reason,) = [event["reason"] for event in events if event["event"] == "straggler"]
    assert reason.startswith("rank 1 on ")
    fast, slow = micro.metrics(runs["data"])[2]["rank_seconds"]
    assert fast < SLOW_SECONDS <= slow


def test_threads_that_use_the_device_choose_it_first(runs):
    """Those that write and read checkpoints; a thread that did not would be rejected."""
    assert training(runs["data"], 1)[usage.THREAD]["checkpoint"] == 1
    assert calls(runs["tensor"], 1)[3]["usage"][usage.THREAD]["read"] > 0


def test_save_copies_each_shard_once(runs):
    """A copy of each state of each bucket, and one wait for all of them."""
    copies = training(runs["data"])[usage.DOWNLOAD]
    saves, buckets, states = 2, 2, 3
    assert copies["parallel/checkpoint/saver.py:Saver._copy"] == saves * buckets * states
    waits = training(runs["data"])[usage.HOST_READ]
    assert waits["parallel/checkpoint/saver.py:Saver._copy device"] == 2
    assert not any("writer" in site and "copy" in site for site in waits)


@pytest.mark.parametrize("name", RESUMED)
def test_resumed_run_has_bit_identical_losses_weights_and_optimizer_states(name, runs):
    ((losses, before, after),) = (call["returned"] for call in calls(runs[name]) if call["name"] == "resume")
    assert losses == {str(step): loss for step, loss in micro.losses(runs[name]).items()}
    assert before == after
    assert before


@pytest.mark.parametrize("name", RESUMED)
def test_evaluation_is_that_of_the_cpu_and_static_and_does_not_block(name, runs, cpu_runs):
    result, cpu = (json.loads((run / "evaluation.json").read_text()) for run in (runs[name], cpu_runs[()]))
    assert result["step"] == cpu["step"] == STEPS
    assert result["validation_loss"] == pytest.approx(cpu["validation_loss"], rel=1e-5)
    assert [len(sample["text"]) for sample in result["samples"]] == [16, 16, 16]
    (used,) = (call["usage"] for call in calls(runs[name]) if call["name"] == "evaluate")
    assert usage.DYNAMIC not in used
    assert blocking_functions(used) <= SETUP | AGREEMENT


def test_checks_of_check_device_pass(runs):
    found = calls(runs["tensor"])[0]["returned"]
    assert "tensor" in found["check_parallel_training"]
    assert "bf16" in found["check_training"]
    assert "reduce-scatter" in found["check_collectives"]
    assert json.loads(found["measure_links"])["node"] > 0
    assert found["calibrate"] == ["bf16", "float32"]
    # The compiler's cache was open when the check first used the device.
    assert "trainshed-check-" in found["settings"]["TORCH_NEURONX_NEFF_CACHE_DIR"]
    assert "experts: float32" in found["tiny-moe"]
    assert "context attention" in found["tiny-moe"]
    assert "FP8 192 × 128: fp8" in found[PAIR]


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_caught(fault, runs, expected):
    """An operation that is rejected, or a loss that is not the CPU's."""
    (made,) = calls(runs[fault])
    if made["error"]:
        assert "Rejected" in made["error"]
    else:
        assert micro.losses(runs[fault])[1] != pytest.approx(expected[()]["loss 1"], rel=1e-5)
