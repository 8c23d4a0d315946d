"""Weights that are stored twice: a tied head, and a file beside an index."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from modeling.conversion import formats
from modeling.conversion.compare import differences
from modeling.conversion.convert import Options, convert
from tests.modeling.conversion.test_convert import MODELS, equal, save


def test_tied_head_may_be_stored_alone_or_too_if_it_equals_the_embedding(tmp_path):
    source = save(MODELS["llama, tied"](), tmp_path / "hf")
    other = shutil.copytree(source, tmp_path / "other")
    state = load_file(source / "model.safetensors")
    embedding = state["model.embed_tokens.weight"]
    without = {name: tensor for name, tensor in state.items() if tensor is not embedding}
    for form in (state | {"lm_head.weight": embedding.clone()}, without | {"lm_head.weight": embedding}):
        save_file(form, other / "model.safetensors")
        assert equal(source, other)
    save_file(state | {"lm_head.weight": embedding + 1}, other / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"lm_head\.weight: differs from model\.embed_tokens\.weight, to which"
    ):
        formats.read(other, None, None)
    nxd = tmp_path / "nxd"
    convert(source, nxd, Options("nxd", tensor=2))
    assert not differences(formats.read(nxd, source, None), formats.read(source, None, None), 1 << 20)
    shard = nxd / "model" / "dp_rank_00_tp_rank_01_pp_rank_00.pt"
    tensors = torch.load(shard)
    tensors["lm_head.weight"] += 1
    torch.save(tensors, shard)
    with pytest.raises(
        ValueError, match=r"lm_head\.weight: differs from model\.embed_tokens\.weight, to which"
    ):
        formats.read(nxd, source, None)
    del tensors["lm_head.weight"]
    torch.save(tensors, shard)
    first = shard.with_name("dp_rank_00_tp_rank_00_pp_rank_00.pt")
    tensors = torch.load(first)
    del tensors["model.norm.weight"], tensors["lm_head.weight"]
    torch.save(tensors, first)
    with pytest.raises(ValueError, match=r"missing: model\.norm\.weight; "):
        formats.read(nxd, source, None)


def test_file_beside_an_index_must_have_the_same_weights(tmp_path):
    llama = save(MODELS["llama"](), tmp_path / "hf")
    sharded = shutil.copytree(llama, tmp_path / "sharded")
    save(MODELS["llama"](), sharded, max_shard_size="20KB")
    assert (sharded / "model.safetensors.index.json").is_file()
    shutil.copy(llama / "model.safetensors", sharded)
    assert equal(llama, sharded)
    state = load_file(llama / "model.safetensors")
    state["model.norm.weight"][-1] += 1
    save_file(state, sharded / "model.safetensors")
    message = (
        r"sharded/model\.safetensors and the files of model\.safetensors\.index\.json hold different weights "
    )
    with pytest.raises(ValueError, match=message + r"\(model\.norm\.weight\); delete"):
        formats.read(sharded, None, None)


def test_bin_files_beside_safetensors_must_be_of_the_same_model(tmp_path, caplog):
    source = save(MODELS["llama, tied"](), tmp_path / "hf")
    state = load_file(source / "model.safetensors")
    head = {"lm_head.weight": state["model.embed_tokens.weight"], "model.rotary_emb.inv_freq": torch.ones(4)}
    without_prefix = {name.removeprefix("model."): tensor for name, tensor in state.items()}
    for form in (state | head, without_prefix, {"layer": 7}):  # the last one is not read at all
        torch.save(form, source / "pytorch_model.bin")
        formats.read(source, None, None)
        assert (
            "hf: weights are read from model.safetensors; those of pytorch_model.bin are not read"
            in caplog.text
        )
        caplog.clear()
    torch.save(state | {"model.layers.9.weight": torch.ones(2)}, source / "pytorch_model.bin")
    message = r"model\.safetensors holds other weights than pytorch_model\.bin beside it \(model\.layers\.9\.weight\); delete"
    with pytest.raises(ValueError, match=message.replace(r"\(model\.", r"\(")):
        formats.read(source, None, None)
