"""The training program on an emulated accelerator (no hardware): the losses of the CPU, one host synchronization a step."""

import json
from pathlib import Path

import pytest

from tests.emulation import usage
from tests.emulation.program import FAULTS
from tests.forked_jobs import run_forked
from tests.modeling import micro

STEPS = 3
SETTINGS = (
    *(f"train.steps={STEPS}", "train.spike_factor=2.0", "evaluate.every=3", "checkpoint.every=2"),
    *("model.num_attention_heads=4", "model.num_key_value_heads=2"),
)
GPT = (
    *("model.architecture=gpt", "model.num_key_value_heads=4", "model.dropout=0.1", "model.hidden_act=gelu"),
    *("model.tie_word_embeddings=true", "model.attention_bias=true", "model.mlp_bias=true"),
)
PIPELINE = ("parallel.tensor=1", "parallel.pipeline=2", "train.micro_batch_size=1")
TWO_RANKS = {
    "tensor": ("parallel.tensor=2", "parallel.overlap_chunks=2"),
    "data": ("parallel.tensor=1",),
    "fsdp": ("parallel.tensor=1", "parallel.data_sharding=fsdp", "train.recompute=full"),
    "context": ("parallel.tensor=1", "parallel.context=2", "train.document_masks=true"),
    "pipeline": PIPELINE,
    "dropout": (*GPT, *PIPELINE, "parallel.schedule=zero_bubble"),
}
DEEP = ("model.num_hidden_layers=4",)
COMPILED = {
    "compiled, interleaved": (*DEEP, *PIPELINE, "parallel.schedule=interleaved"),
    "compiled, fsdp": ("parallel.tensor=1", "parallel.data_sharding=fsdp"),
}
FOUR_RANKS = {
    "tensor 4": ("parallel.tensor=4",),  # with replicated KV heads
    "tensor 2, pipeline 2": (*PIPELINE, "parallel.tensor=2"),
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    return micro.dataset(tmp_path_factory.mktemp("data"))


def start_runs(folder: Path, dataset: Path, runs: dict[str, dict], ranks: int) -> dict[str, Path]:
    """Run a job on the emulated device. Returns the run folders by name."""
    folders, job = {}, []
    for name, entry in runs.items():
        settings = (
            *SETTINGS,
            *entry.pop("settings"),
            f"cluster.devices_per_node={ranks}",
            "cluster.device=neuron",
        )
        folders[name] = micro.run_folder(folder / name.replace(" ", "_"), *settings)
        job.append({"run": str(folders[name]), "dataset": str(dataset), **entry})
    (folder / "job.json").write_text(json.dumps(job))
    code, output = run_forked("tests.emulation.program", [folder / "job.json"], ranks)
    assert code == 0, output[-4000:]
    return folders


def calls(run: Path, rank: int = 0) -> list[dict]:
    """What each call of a run returned and did on a rank's device."""
    return json.loads((run / f"calls_{rank}.json").read_text())


def training(run: Path, rank: int = 0) -> dict[str, dict[str, int]]:
    """What a run's training did on a rank's device."""
    return next(call["usage"] for call in calls(run, rank) if call["name"] in ("train", "steps"))


@pytest.fixture(scope="module")
def expected(tmp_path_factory, dataset) -> dict[tuple[str, ...], dict[int, float]]:
    """Losses on one process of the CPU, by the settings that change them."""
    losses = {}
    for number, settings in enumerate(((), GPT, DEEP, ("train.document_masks=true",))):
        run = micro.run_folder(
            tmp_path_factory.mktemp(f"cpu{number}"), *SETTINGS, *settings, "parallel.tensor=1", "cluster.devices_per_node=1"
        )  # fmt: skip
        micro.run("training.train", "--run-folder", run, "--dataset", dataset, processes=0)
        losses[settings] = micro.losses(run)
    return losses


@pytest.fixture(scope="module")
def runs(tmp_path_factory, dataset) -> dict[str, Path]:
    """Finished runs: each topology of two ranks, one resumed and evaluated; and one run for each fault."""
    entries = {name: {"settings": settings, "calls": ["train"]} for name, settings in TWO_RANKS.items()}
    entries["tensor"]["calls"] = ["check_device", "train", "evaluate", "resume"]
    entries |= {
        fault: {"settings": ("train.steps=2", *TWO_RANKS["tensor"]), "calls": ["train"], "fault": fault} for fault in FAULTS
    }  # fmt: skip
    return start_runs(tmp_path_factory.mktemp("two"), dataset, entries, 2)


@pytest.fixture(scope="module")
def compiled_runs(tmp_path_factory, dataset) -> dict[str, Path]:
    common = ("compile.enabled=true", "evaluate.every=0", "checkpoint.every=0")
    entries = {
        name: {"settings": (*settings, *common), "calls": ["steps"]} for name, settings in COMPILED.items()
    }
    return start_runs(tmp_path_factory.mktemp("compiled"), dataset, entries, 2)


@pytest.fixture(scope="module")
def larger_runs(tmp_path_factory, dataset) -> dict[str, Path]:
    entries = {name: {"settings": settings, "calls": ["train"]} for name, settings in FOUR_RANKS.items()}
    return start_runs(tmp_path_factory.mktemp("four"), dataset, entries, 4)


def mathematics(settings: tuple[str, ...]) -> tuple[str, ...]:
    """The settings that change losses."""
    for model in (GPT, DEEP):
        if settings[: len(model)] == model:
            return model
    return tuple(setting for setting in settings if setting == "train.document_masks=true")


@pytest.mark.parametrize("name", TWO_RANKS)
def test_losses_are_those_of_the_cpu(name, runs, expected):
    losses = expected[mathematics(TWO_RANKS[name])]
    assert micro.losses(runs[name]) == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_step_runs_no_operator_outside_compiled_programs(name, compiled_runs, expected):
    """On any rank; torch's all-reduce copies its input, which needs no program."""
    run = compiled_runs[name]
    assert micro.losses(run) == pytest.approx(expected[mathematics(COMPILED[name])], rel=1e-5)
    for rank in range(2):
        outside = training(run, rank).get(usage.EAGER, {})
        assert set(outside) <= {"parallel/collectives.py:__init__ copy_"}


@pytest.mark.parametrize("name", FOUR_RANKS)
def test_losses_on_four_ranks_are_those_of_the_cpu(name, larger_runs, expected):
    assert micro.losses(larger_runs[name]) == pytest.approx(expected[()], rel=1e-5)


@pytest.mark.parametrize("name", TWO_RANKS)
def test_step_waits_for_the_device_once(name, runs):
    """Besides waits of saves, of the evaluation, and of pipelines before their first step and evaluation, to agree on shapes."""
    used = training(runs[name])
    waits = used[usage.HOST_READ]
    expected = {
        "parallel/device.py:wait event": STEPS,
        "modeling/training/evaluate.py:evaluate_samples copy": 1,
    }
    if "parallel.pipeline=2" in TWO_RANKS[name]:
        expected["parallel/pipeline/pipeline.py:_run _local_scalar_dense"] = 2
    assert {
        site: count for site, count in waits.items() if "checkpoint" not in site and "replicas" not in site
    } == expected
    assert usage.DYNAMIC not in used


def test_save_copies_each_shard_once(runs):
    """A copy of each state of each bucket, and one wait for all of them."""
    waits = training(runs["data"])[usage.HOST_READ]
    assert waits["parallel/checkpoint/saver.py:_copy device"] == 2
    assert not any("writer" in site and "copy" in site for site in waits)


def test_resumed_run_has_bit_identical_losses(runs):
    resumed = calls(runs["tensor"])[3]["returned"]
    assert resumed == {str(step): loss for step, loss in micro.losses(runs["tensor"]).items()}


def test_evaluation_and_sampling(runs):
    result = json.loads((runs["tensor"] / "evaluation.json").read_text())
    assert result["step"] == STEPS
    assert 0 < result["validation_loss"] < 6
    assert [len(sample["text"]) for sample in result["samples"]] == [16, 16, 16]
    assert usage.DYNAMIC not in calls(runs["tensor"])[2]["usage"]


def test_checks_of_check_device_pass(runs):
    assert "tensor" in calls(runs["tensor"])[0]["returned"]["check_parallel_training"]


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_caught(fault, runs, expected):
    """An operation that is rejected, or a loss that is not the CPU's."""
    (made,) = calls(runs[fault])
    if made["error"]:
        assert "Rejected" in made["error"]
    else:
        assert micro.losses(runs[fault])[1] != pytest.approx(expected[()][1], rel=1e-5)
