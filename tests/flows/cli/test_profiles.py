"""A small shipped profile of each kind of parallelism on two ranks, from the tokenizer to an export.

That every shipped profile trains, with its own degrees, recomputation and schedule, is tested in tests/profiles/test_training.py.
"""

import json

import pytest

from flows.cli.main import main
from profiles import resolve
from tests.flows.micro import losses, settings, write_profile
from tests.forked_jobs import forked_jobs

pytestmark = pytest.mark.slow

THROUGH_THE_COMMAND = "llama3-70b"  # the others by calling the flow
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
    "cluster={launcher: local, devices_per_node: 2, device: cpu, threads: 1}",
)
FAMILIES = {
    "llama3-70b": ("parallel.tensor=2", "model.num_attention_heads=8", "model.num_key_value_heads=1"),
    "llama3-70b-cp": (
        *("parallel.tensor=1", "parallel.pipeline=1", "parallel.context=2", "parallel.shard_degree=null"),
        *("model.num_attention_heads=8", "model.num_key_value_heads=1"),
    ),
    "gpt3-175b": (
        *("parallel.tensor=1", "parallel.pipeline=2", "model.num_attention_heads=4"),
        *("parallel.schedule=1f1b", "parallel.pipeline_cuts=null"),
        "train.recompute=[selective 1, none]",  # an entry for each stage
    ),
    "deepseek-coder-1.3b": (
        *("parallel.tensor=1", "parallel.data_sharding=fsdp"),
        *("model.num_attention_heads=4", "model.num_key_value_heads=4"),
    ),
}


@pytest.fixture(scope="module")
def family_store(tmp_path_factory):
    """Folder with texts and a store, to build tokenizer and dataset once, and the overrides naming them."""
    folder = tmp_path_factory.mktemp("families")
    write_profile(folder)
    data = f"data.sources=[{{kind: files, path: '{folder / 'texts.jsonl'}'}}]"
    return folder, (data, "data.validation_fraction=0.1")


@pytest.mark.parametrize("name", sorted({*FAMILIES} - {THROUGH_THE_COMMAND}))
def test_profile_trains_and_exports(prefect_server, family_store, name):
    from flows.pretrain import pretrain

    folder, data = family_store
    with forked_jobs():
        pretrain(name, [*SMALL, *FAMILIES[name], *data], None, str(folder / "store"))
    _check(folder, name)


def test_profile_trains_and_exports_through_the_command(prefect_server, family_store, capsys):
    """As JSON: one document on standard output, the rest on standard error."""
    folder, data = family_store
    overrides = settings(*SMALL, *FAMILIES[THROUGH_THE_COMMAND], *data)
    arguments = ("run", THROUGH_THE_COMMAND, *overrides, "--store", str(folder / "store"), "--json")
    with forked_jobs():
        code = main([*arguments])
    out, err = capsys.readouterr()
    assert code == 0, err
    result = json.loads(out)
    assert result["run"] == THROUGH_THE_COMMAND
    assert "tokenizer" in err
    assert {step["how"] for step in result["steps"]} <= {"done", "cached", "skipped"}
    _check(folder, THROUGH_THE_COMMAND)


def _check(folder, name):
    """Assert that three steps were trained, the loss fell, and the export has the right architecture."""
    found = losses(folder / "store/runs" / name)
    assert sorted(found) == [1, 2, 3]
    assert found[3] < found[1]
    config = json.loads((folder / "store/runs" / name / "export/config.json").read_text())
    assert config["model_type"] == {"llama": "llama", "gpt": "gpt2"}[resolve.load(name).model.architecture]
