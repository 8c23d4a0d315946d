"""Shipped profiles at small size by overrides, from the tokenizer to an export: one of each family through `trainshed run` and on
four processes, every other one on two.
"""

import json

import pytest

from profiles import resolve
from tests.flows.micro import losses, settings, write_profile

FAMILIES = ["llama2-7b", "llama3-70b", "llama3-70b-cp", "gpt3-175b", "deepseek-coder-1.3b"]
SMALL = (
    *(
        "model.hidden_size=64",
        "model.intermediate_size=128",
        "model.num_hidden_layers=2",
        "model.vocab_size=300",
    ),
    *(
        "model.max_position_embeddings=64",
        "tokenizer={source: train, vocabulary_size: 300}",
        "init.from=null",
    ),
    *("train.steps=3", "train.warmup_steps=1", "train.constant_steps=0", "train.global_batch_size=8"),
    *(
        "train.sequence_length=32",
        "train.learning_rate=1e-2",
        "train.minimum_learning_rate=0.0",
        "compile.enabled=false",
    ),
    *(
        "cluster={launcher: local, devices_per_node: 4, device: cpu, threads: 1}",
        "parallel.kv_replication=null",
    ),
)
DEGREES = {
    "llama2-7b": ("parallel.tensor=2", "model.num_attention_heads=4", "model.num_key_value_heads=4"),
    "llama3-70b": (
        *("parallel.tensor=2", "parallel.pipeline=2"),
        *("model.num_attention_heads=8", "model.num_key_value_heads=1"),
    ),
    "llama3-70b-cp": (
        *("parallel.tensor=2", "parallel.pipeline=1"),
        *("model.num_attention_heads=8", "model.num_key_value_heads=1"),
    ),
    "gpt3-175b": ("parallel.tensor=2", "parallel.pipeline=2", "model.num_attention_heads=4"),
    "deepseek-coder-1.3b": (
        "parallel.tensor=2",
        "model.num_attention_heads=4",
        "model.num_key_value_heads=4",
    ),
}


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """A folder with texts and a store, so that tokenizer and data are made once, and the overrides that name them."""
    folder = tmp_path_factory.mktemp("families")
    write_profile(folder)
    data = f"data.sources=[{{kind: files, path: '{folder / 'texts.jsonl'}'}}]"
    return folder, (data, "data.validation_fraction=0.1")


def check(folder, name):
    """Three steps were trained, the loss fell, and there is an export of the right kind."""
    found = losses(folder / "store/runs" / name)
    assert sorted(found) == [1, 2, 3]
    assert found[3] < found[1]
    config = json.loads((folder / "store/runs" / name / "export/config.json").read_text())
    assert config["model_type"] == {"llama": "llama", "gpt": "gpt2"}[resolve.load(name).model.architecture]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_goes_through_the_whole_pipeline(prefect_server, command, place, name):
    folder, data = place
    overrides = settings(*SMALL, *DEGREES[name], *data)
    arguments = ("run", name, *overrides, "--store", str(folder / "store"), "--json")
    code, out, err = command(*arguments, PREFECT_API_URL=prefect_server).result()
    assert code == 0, err
    result = json.loads(out)
    assert {step["how"] for step in result["steps"]} <= {"done", "cached", "skipped"}
    check(folder, name)


@pytest.mark.parametrize("name", sorted(set(resolve.names()) - set(FAMILIES) - {"tiny"}))
def test_every_other_profile_trains(prefect_server, place, name):
    from flows.pretrain import pretrain

    folder, data = place
    whole = resolve.load(name)
    heads, kv_heads = whole.model.num_attention_heads, whole.model.num_key_value_heads
    shape = (
        f"model.num_attention_heads={4 if heads == kv_heads else 8}",
        f"model.num_key_value_heads={4 if heads == kv_heads else 1}",
        f"parallel.tensor={min(2, whole.parallel.tensor)}",
        f"parallel.pipeline={2 if whole.parallel.tensor == 1 and whole.parallel.pipeline > 1 else 1}",
        "parallel.context=1",
        "cluster.devices_per_node=2",
    )
    pretrain(name, [*SMALL, *shape, *data], None, str(folder / "store"))
    check(folder, name)
