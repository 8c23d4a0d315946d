"""Checkpoint step: the artifact's contents and key, rejected weights, and warnings."""

import json
import logging
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from modeling.conversion import formats
from modeling.conversion.compare import differences
from profiles import resolve
from profiles.errors import ProfileError
from profiles.huggingface.config import GENERATION_CONFIG
from tasks.sources.shard import SourceError
from tasks.step import Context
from tasks.steps.checkpoint import CheckpointStep
from tests.modeling.conversion.nxd import nxd_shards
from tests.profiles.pair import PAIR

HEADS = {"num_attention_heads": nxd_shards.HEADS, "num_key_value_heads": nxd_shards.KV_HEADS}
MODEL = {
    "hidden_size": nxd_shards.HIDDEN,
    "intermediate_size": nxd_shards.FFN,
    "num_hidden_layers": nxd_shards.LAYERS,
    **HEADS,
    "head_dim": nxd_shards.D,
    "vocab_size": nxd_shards.VOCABULARY,
    "max_position_embeddings": 64,
}


@pytest.fixture
def weights(tmp_path) -> Path:
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(nxd_shards.CONFIG))
    save_file(nxd_shards.model(), folder / "model.safetensors")
    return folder


def profile(source: Path, *overrides: str):
    fields = [f"model.{name}={value}" for name, value in MODEL.items()]
    return resolve.load(PAIR, [*fields, f"init.from={source}", "tokenizer.vocabulary_size=100", *overrides])


def same(one: Path, other: Path) -> bool:
    return not differences(formats.read(one, None, None), formats.read(other, None, None), 1 << 20)


def test_artifact_is_split_for_the_profiles_topology(weights, store):
    (weights / GENERATION_CONFIG).write_text('{"eos_token_id": [1, 2], "top_p": 0.9}')
    run = profile(weights, "parallel.tensor=4", "parallel.pipeline=2", "cluster.devices_per_node=8")
    key = CheckpointStep().key(Context(run, store))
    made = CheckpointStep().run(Context(run, store))
    assert same(weights, store.artifacts.path(made))
    assert len(list(store.artifacts.path(made).glob("*.distcp"))) == 8
    assert made.summary["generation_config"] == {"eos_token_id": [1, 2], "top_p": 0.9}
    assert CheckpointStep().run(Context(run, store)) == made
    # The key depends neither on the path nor on the topology.
    other = weights.rename(weights.with_name("elsewhere"))
    assert CheckpointStep().key(Context(profile(other, "parallel.tensor=1"), store)) == key
    state = load_file(other / "model.safetensors")
    save_file(state | {"lm_head.weight": state["lm_head.weight"] + 1}, other / "model.safetensors")
    assert CheckpointStep().key(Context(profile(other), store)) != key


def test_nxd_weights_get_their_shapes_from_the_profiles_model(tmp_path, weights, store):
    shards = nxd_shards.shards(nxd_shards.model(), 2, [range(4)])
    folder = nxd_shards.save(shards, "model/dp_rank_00_tp_rank_{t:02}_pp_rank_{p:02}.pt", tmp_path / "nxd")
    run = profile(folder)
    assert same(weights, store.artifacts.path(CheckpointStep().run(Context(run, store))))
    shared = nxd_shards.shards(nxd_shards.model(), 4, [range(4)], layout="trn2")  # two ranks for each KV head
    folder = nxd_shards.save(shared, "model/dp_rank_00_tp_rank_{t:02}_pp_rank_{p:02}.pt", tmp_path / "trn2")
    with pytest.raises(ProfileError, match=r"init\.nxd_layout: is missing: 2 ranks share .*: trn1, trn2"):
        CheckpointStep().run(Context(profile(folder), store))
    run = profile(folder, "init.nxd_layout=trn2")
    assert same(weights, store.artifacts.path(CheckpointStep().run(Context(run, store))))


def test_weights_of_another_model_are_rejected_and_leave_no_artifact(weights, store):
    run = profile(weights, "model.intermediate_size=64")
    with pytest.raises(ProfileError, match=r"init\.from = .*gate_proj\.weight: shape \(48, 32\)"):
        CheckpointStep().run(Context(run, store))
    assert store.artifacts.find(CheckpointStep.id(CheckpointStep().key(Context(run, store)))) is None


def test_settings_not_in_the_weights_are_compared_with_their_config(weights, store, caplog):
    caplog.set_level(logging.WARNING)
    run = profile(weights, "model.rope_theta=500000.0", "model.norm_eps=1e-6")
    CheckpointStep().run(Context(run, store))
    assert "model.rope_theta is 500000.0 here, 10000.0 in the weights' config.json" in caplog.text
    assert "model.norm_eps is 1e-06 here, 1e-05 in the weights' config.json" in caplog.text


@pytest.mark.parametrize("file", ["config.json", "complete.json"])
def test_weights_that_fit_a_model_of_other_heads_in_shape_are_rejected(weights, store, file):
    if file == "complete.json":
        weights = store.artifacts.path(CheckpointStep().run(Context(profile(weights), store)))
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 8}
    run = profile(weights, *(f"model.{name}={value}" for name, value in heads.items()))
    found = f"model.num_attention_heads is 4 here, 8 in the weights' {file}; model.num_key_value_heads is 1 here, 2 in .*head_dim"
    with pytest.raises(ProfileError, match=rf"init\.from = .*{found}"):
        CheckpointStep().run(Context(run, store))


def test_weights_replaced_after_their_key_was_computed_are_an_error(weights, store):
    context, step = Context(profile(weights), store), CheckpointStep()
    key = step.key(context)
    state = load_file(weights / "model.safetensors")
    save_file(state | {"lm_head.weight": state["lm_head.weight"] + 1}, weights / "model.safetensors")
    with pytest.raises(
        SourceError, match="weights: has changed since the run's inputs were resolved; restore it"
    ):
        step.run(context, key)
    assert store.artifacts.find(CheckpointStep.id(key)) is None
