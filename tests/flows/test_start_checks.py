"""Checks before a run: what it starts from."""

import json
from contextlib import nullcontext

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from flows.start_checks import RunCommand, check_run, overrides_from
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


CHAT = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}]}


@pytest.mark.parametrize(
    ("tokens", "record", "reason"),
    [
        (["x", "</s>"], CHAT, r"objective\.template: is missing: the data has messages, .*chatml"),
        (["x", "</s>"], {"prompt": "x", "completion": "x"}, None),
        (["x"], CHAT, r"data\.append_eos = true: the tokenizer .* has no EOS token"),
        ([*map(str, range(5000)), "</s>"], CHAT, r"model\.vocab_size = \d+: the tokenizer has 5001 tokens"),
        ([], CHAT, r"tokenizer\.source = .*/tokenizer: "),
        (["x", "</s>"], None, r"data\.sources\.0\.path = .*: no file matches"),
    ],
)
def test_tokenizer_in_a_folder_is_checked_before_any_step(tmp_path, tokens, record, reason):
    folder, data = tmp_path / "tokenizer", tmp_path / "data"
    folder.mkdir(), data.mkdir()
    if tokens:
        tokenizer = Tokenizer(
            models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=tokens[0])
        )
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.save(str(folder / "tokenizer.json"))
    if record:
        (data / "a.jsonl").write_text(json.dumps(record))
    sources = json.dumps([{"kind": "files", "path": f"{data}/*.jsonl"}])
    overrides = [f"tokenizer.source={folder}", f"init.from={tmp_path}", f"data.sources={sources}"]
    profile = resolve.load("tiny-sft", overrides)
    command = RunCommand("tiny-sft", overrides, None, str(tmp_path / "store"))
    with pytest.raises(ProfileError, match=reason) if reason else nullcontext():
        check_run(profile, command)
