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
from tests.modeling.models.families.huggingface import OWN_NAMES, as_stored, build_pair, module_tensors
from tests.modeling.models.families.test_llama import DEEPSEEK, GLM
from tests.modeling.models.families.test_multi_token import KINDS

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
    tensors = save_published(kind, config, folder)
    for number in range(LAYERS, LAYERS + DEPTH):
        for name, original in COPIES.items():
            tensors[f"model.layers.{number}.{name}.weight"] = tensors[f"{original}.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    return folder


def save_published(kind, config, folder):
    """Save transformers' model, and return its tensors with those of its modules."""
    theirs, *_ = build_pair(kind, config)
    modules = theirs.mtp.state_dict()
    del theirs.mtp
    theirs.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    return tensors | as_stored(config.model_type.removesuffix("_text"), module_tensors(modules, config))


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5"])
def test_module_of_a_hybrid_is_read_and_written_as_published(name, tmp_path, caplog):
    kind, config = KINDS[name]
    published, split, back, without = (tmp_path / part for part in ("published", "split", "back", "without"))
    tensors = save_published(kind, config, published)
    save_file(
        {each: tensor.contiguous() for each, tensor in tensors.items()}, published / "model.safetensors"
    )
    values = json.loads((published / "config.json").read_text())
    # Qwen3-Next's published config.json has no number of modules: the files tell.
    left_out = {*OWN_NAMES, "num_nextn_predict_layers"}
    published.joinpath("config.json").write_text(
        json.dumps({each: value for each, value in values.items() if each not in left_out})
    )
    convert(published, split, Options("trainshed", tensor=2, pipeline=2))
    convert(split, back, Options("hf"))
    found = load_file(back / "model.safetensors")
    assert found.keys() == tensors.keys()
    assert {"mtp.fc.weight", "mtp.layers.0.self_attn.q_proj.weight", "mtp.norm.weight"} <= found.keys()
    assert all(torch.equal(found[each], tensors[each]) for each in tensors)
    convert(published, without, Options("hf", modules=False))
    assert not any(each.startswith("mtp.") for each in load_file(without / "model.safetensors"))
    with caplog.at_level("INFO"):
        formats.read(published, without, None)
    assert "modules for multi-token prediction beyond num_nextn_predict_layers 0: mtp." in caplog.text
    tensors["mtp.layers.1.input_layernorm.weight"] = tensors[
        "model.norm.weight"
    ].clone()  # of a second module
    save_file(
        {each: tensor.contiguous() for each, tensor in tensors.items()}, published / "model.safetensors"
    )
    with pytest.raises(ValueError, match=r"does not have: mtp\.layers\.1\.input_layernorm"):
        formats.read(published, None, None)


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
    main = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    loaded = MtpModel.from_pretrained(main)
    loaded = module_tensors(loaded.state_dict(), main.config)
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
