"""Checks before a run: what it starts from."""

import json

import pytest

from flows.start_checks import overrides_from
from profiles import resolve
from profiles.errors import ProfileError
from tasks.store.store import Store

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "vocab_size": 300,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def test_run_from_another_has_its_weights_tokenizer_and_model(tmp_path):
    """Neither dimensions nor the tokenizer's size are repeated; own overrides count."""
    export = tmp_path / "runs/mine/export"
    export.mkdir(parents=True)
    (export / "config.json").write_text(json.dumps(CONFIG))
    overrides = [*overrides_from("run:mine", Store(str(tmp_path))), "train.sequence_length=64"]
    profile = resolve.load("tiny-sft", overrides)
    resolve.check(profile)
    assert (profile.init.from_, profile.tokenizer.source, profile.tokenizer.vocabulary_size) == (
        *("run:mine", "run:mine"),
        None,
    )
    assert (profile.model.hidden_size, profile.model.vocab_size, profile.train.sequence_length) == (
        32,
        300,
        64,
    )
    of_folder = resolve.load("tiny-sft", overrides_from(str(export), Store(str(tmp_path))))
    assert of_folder.model == profile.model
    assert of_folder.init.from_ == of_folder.tokenizer.source == str(export)


def test_unknown_model_to_start_from_is_rejected_with_the_runs(tmp_path):
    (tmp_path / "runs/mine/export").mkdir(parents=True)
    (tmp_path / "runs/mine/export/config.json").write_text("{}")
    store = Store(str(tmp_path))
    with pytest.raises(
        ProfileError, match=r"--from = run:mien: .* has no run mien with an export; nearest valid: run:mine"
    ):
        overrides_from("run:mien", store)
    with pytest.raises(
        ProfileError, match=r"--from = mine: is neither run:NAME, .*; nearest valid: run:mine"
    ):
        overrides_from("mine", store)


def test_size_of_an_inherited_tokenizer_does_not_apply_to_another(tmp_path):
    path = tmp_path / "sft.yaml"
    path.write_text("extends: tiny\ntokenizer: {source: 'run:mine'}\nmodel: {vocab_size: 400}\n")
    resolve.check(resolve.load(str(path)))
    resolve.check(resolve.load("tiny", ["model.vocab_size=400", "tokenizer.source=run:mine"]))
    with pytest.raises(
        ProfileError, match=r"tokenizer\.vocabulary_size = 500: is larger than model\.vocab_size 400"
    ):
        resolve.check(resolve.load(str(path), ["tokenizer.vocabulary_size=500"]))
