"""README end to end: `prefect deployment run pretrain/llama3-70b` through server, worker and Slurm.

Overrides change only sizes, parallel degrees, steps and endpoints: gated repositories of a hub on loopback replace Hugging Face,
and two CPU nodes, of which one dies during training, replace the eight Trainium nodes.
"""

import io
import json
import os
import random
import subprocess
import sys

import pyarrow
import pyarrow.parquet as parquet
import pytest
import torch

from tests.flows.cli.test_up import ask, only
from tests.flows.micro import exported, losses
from tests.hub import TOKEN, Hub
from tests.slurm.conftest import register_deployment, worker
from tests.waiting import until

REPOSITORY = "meta-llama/Meta-Llama-3-70B"  # of the profile's tokenizer, and here of weights to start from
LENGTH, STEPS, KILLED_AT = 32, 40, 15
MODEL = {
    "hidden_size": 64,
    "intermediate_size": 224,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "vocab_size": 300,
    "max_position_embeddings": 64,
}
OVERRIDES = (
    *(f"model.{name}={value}" for name, value in MODEL.items()),
    "parallel.tensor=2",
    *(f"train.steps={STEPS}", "train.warmup_steps=6", "checkpoint.every=10"),
    *(f"train.sequence_length={LENGTH}", "train.global_batch_size=4"),
    *(
        "cluster.nodes=2",
        "cluster.devices_per_node=1",
        "cluster.device=cpu",
        "cluster.threads=1",
        "cluster.accelerator=null",
    ),
    f"init.from={REPOSITORY}",
    "compile.enabled=true",  # as on the profile's device; for so short a run on CPUs, it would not pay
)
TASKS = {"plan", "tokenizer", "dataset", "checkpoint", "graphs", "train", "evaluate", "export", "report"}


def documents() -> list[str]:
    chance = random.Random(0)
    words = ["".join(chance.choices("abcdefgh", k=chance.randint(2, 6))) for _ in range(60)]
    return [" ".join(chance.choices(words, k=40)) for _ in range(1000)]


def table(texts: list[str]) -> bytes:
    out = io.BytesIO()
    parquet.write_table(pyarrow.table({"title": texts, "text": texts}), out)
    return out.getvalue()


def save_tokenizer(folder) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MODEL["vocab_size"],
        special_tokens=[*special.values()],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents(), trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """A model repository's folder: a transformers Llama and its tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("pretrained")
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    LlamaForCausalLM(LlamaConfig(**MODEL, rope_parameters=rope, rms_norm_eps=1e-5)).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def hub(pretrained):
    """A hub with gated weights and tokenizer, and the dataset in Parquet, as the hub converts it."""
    texts = documents()
    with Hub() as hub:
        hub.commit(REPOSITORY, {path.name: path.read_bytes() for path in pretrained.iterdir()}, gated=True)
        files = {
            "raw_en/train/0000.parquet": table(texts[:500]),
            "raw_en/train/0001.parquet": table(texts[500:]),
        }
        hub.commit("gboleda/wikicorpus", files, kind="datasets", gated=True, ref="refs/convert/parquet")
        yield hub


@pytest.mark.compiles
@pytest.mark.timeout(2000)  # compiles while other tests use the cores
def test_llama3_70b_trains_through_server_worker_and_slurm_despite_a_dead_node(
    cluster, prefect_server, hub, pretrained, tmp_path
):
    store = tmp_path / "store"
    folder = store / "runs/llama3-70b"
    endpoints = {
        "HF_ENDPOINT": hub.url,
        "HF_TOKEN": TOKEN,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(tmp_path / "hub"),
    }
    register_deployment(prefect_server, "llama3-70b", tmp_path)
    with worker(prefect_server, tmp_path / "worker.log", **endpoints):
        started = subprocess.run(
            [
                *(sys.executable, "-m", "prefect", "deployment", "run", "pretrain/llama3-70b"),
                *("-p", f"overrides={json.dumps(OVERRIDES)}", "-p", f"store={store}"),
            ],
            env={**os.environ, "PREFECT_API_URL": prefect_server},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert started.returncode == 0, started.stderr
        deployed = {"deployments": {"name": {"any_": ["llama3-70b"]}}}

        def state() -> str:
            (run,) = ask(f"{prefect_server}/flow_runs/filter", deployed)
            return run["state_type"]

        def ended() -> bool:
            return state() in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")

        metrics = folder / "metrics.jsonl"

        def trains() -> bool:
            return metrics.exists() and metrics.read_text().count('"loss"') >= KILLED_AT

        until(lambda: trains() or ended(), 1200, every=1)
        cluster.kill_node("n2")
        until(ended, seconds=600, every=1)
        assert state() == "COMPLETED", (tmp_path / "worker.log").read_text()

    # Every step completed as a task; the server creates task runs from events, with a delay.
    (run,) = ask(f"{prefect_server}/flow_runs/filter", deployed)

    def tasks() -> dict[str, str]:
        return {
            each["name"]: each["state_name"]
            for each in ask(f"{prefect_server}/task_runs/filter", only(run["id"]))
        }

    until(lambda: {name.split()[0] for name in tasks()} >= TASKS, every=1)
    assert {*tasks().values()} == {"Completed"}

    # The job restarted without the dead node, each step is recorded once, and no graph was compiled in training.
    log = (folder / "logs/train.log").read_text()
    # If Slurm requeues the job after the flow has submitted the next one, the latter finds nothing left to do.
    first, second, *_ = (line for line in log.splitlines() if "rendezvous at" in line)
    assert "on n1 n2;" in first
    assert "start 2" in second
    assert "n2" not in second
    assert "resumed from step" in log
    assert list(losses(folder)) == list(range(1, STEPS + 1))
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert {row["graph_cache_misses"] for row in rows if "loss" in row} == {0}
    assert all(row["graph_cache_hits"] for row in rows if "loss" in row)

    # The export loads, generates and has the evaluated loss.
    (dataset,) = (store / "artifacts/dataset").iterdir()
    (evaluation,) = (store / "artifacts/evaluation").glob("*/evaluation.json")
    loss, text = exported(folder / "export", dataset, LENGTH)
    assert loss == pytest.approx(json.loads(evaluation.read_text())["validation_loss"], abs=2e-2)  # of bf16
    assert isinstance(text, str)
    from safetensors.torch import load_file

    before, after = (load_file(each / "model.safetensors") for each in (pretrained, folder / "export"))
    assert before.keys() == after.keys()
    change = {name: (after[name].float() - before[name].float()).abs().max() for name in before}
    assert 0 < max(change.values()) < 0.01  # newly initialized weights would differ several times as much

    assert {token for _, path, token in hub.requests if "/resolve/" in path} == {TOKEN}
    # The token is neither in the store, nor in the hub's cache, nor in a log.
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if TOKEN.encode() in path.read_bytes()]
