"""Conversion of modules for multi-token prediction, which are stored as layers beyond the last."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
)
from transformers.modeling_layers import MtpModel

from modeling.conversion import formats
from modeling.conversion.convert import Options, convert
from tests.modeling.models.families.huggingface import as_stored, build_pair, module_tensors
from tests.modeling.models.families.test_llama import DEEPSEEK, GLM

DEPTH, LAYERS = 2, DEEPSEEK["num_hidden_layers"]
COPIES = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}


@pytest.fixture(
    scope="module",
    params=[
        (DeepseekV3ForCausalLM, DeepseekV3Config(**DEEPSEEK)),
        (Glm4MoeForCausalLM, Glm4MoeConfig(**GLM, use_qk_norm=True)),
    ],
    ids=["deepseek_v3", "glm4_moe"],
)
def published(request, tmp_path_factory):
    """A folder as published: transformers' model and modules, and copies of embedding and head."""
    folder, (kind, config) = tmp_path_factory.mktemp("published"), request.param
    config.num_nextn_predict_layers = DEPTH
    theirs, *_ = build_pair(kind, config)
    modules = theirs.mtp.state_dict()
    del theirs.mtp
    theirs.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors |= as_stored(config.model_type, module_tensors(modules, LAYERS))
    for number in range(LAYERS, LAYERS + DEPTH):
        for name, original in COPIES.items():
            tensors[f"model.layers.{number}.{name}.weight"] = tensors[f"{original}.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_modules_round_trip_through_a_topology_with_every_tensor(published, tmp_path, monkeypatch):
    expected = load_file(published / "model.safetensors")
    convert(published, tmp_path / "split", Options("trainshed", tensor=2, pipeline=2))
    convert(tmp_path / "split", tmp_path / "back", Options("hf"))
    found = load_file(tmp_path / "back/model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    # transformers' own loader, whose pattern has the number of the published model's layers
    pattern = [rf"model\.layers\.{LAYERS}.*", rf"model\.layers\.{LAYERS + 1}.*"]
    kind = type(AutoModelForCausalLM.from_pretrained(published))
    monkeypatch.setattr(kind, "_keys_to_ignore_on_load_unexpected", pattern)
    loaded = MtpModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "back"))
    loaded = module_tensors(loaded.state_dict(), LAYERS)
    same = {name for name in loaded.keys() & expected.keys() if torch.equal(loaded[name], expected[name])}
    assert {f"model.layers.{LAYERS + 1}.{name}.weight" for name in ("eh_proj", "enorm", "hnorm")} <= same


def test_modules_are_left_out_on_request_and_where_the_files_have_none(published, tmp_path, caplog):
    everything = load_file(published / "model.safetensors")
    own = {
        name
        for name in everything
        if not name.startswith(tuple(f"model.layers.{LAYERS + i}." for i in range(DEPTH)))
    }
    convert(published, tmp_path / "without", Options("hf", modules=False))
    assert load_file(tmp_path / "without/model.safetensors").keys() == own
    config = json.loads((tmp_path / "without/config.json").read_text())
    assert config["num_nextn_predict_layers"] == 0
    with caplog.at_level("INFO"):
        formats.read(published, tmp_path / "without", None)
    assert (
        f"modules for multi-token prediction beyond num_nextn_predict_layers 0: model.layers.{LAYERS}."
        in caplog.text
    )
    # transformers writes their number without them
    (tmp_path / "without/config.json").write_text((published / "config.json").read_text())
    assert not formats.read(tmp_path / "without", None, None).model.prediction_layers
    with pytest.raises(
        ValueError, match=r"missing: model\.layers\.3\..*without multi-token prediction, set num_nextn"
    ):
        formats.read(tmp_path / "without", published, None)


def test_a_copy_that_differs_is_rejected(published, tmp_path):
    tensors = load_file(published / "model.safetensors")
    name = f"model.layers.{LAYERS}.shared_head.head.weight"
    tensors[name][0, 0] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((published / "config.json").read_text())
    with pytest.raises(ValueError, match=r"shared_head\.head\.weight: differs from lm_head\.weight"):
        formats.read(tmp_path, None, None)
