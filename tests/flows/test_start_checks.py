"""Checks before a run: what it starts from, and the gates of a round."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from flows.start_checks import RunCommand, check_run, overrides_from
from flows.verdicts import check_gates, missing_held_out
from profiles import resolve
from profiles.errors import ProfileError
from tasks.continual.series import Promoted
from tasks.continual.stand_in import warn_if_unknown
from tasks.step import Context
from tasks.steps.dataset import DatasetStep
from tasks.store import ledger, runs
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


@pytest.fixture
def series(tmp_path):
    """The store of a series that began with weights of the hub, and its first run as promoted model."""
    store = Store(str(tmp_path))
    runs.open_run(store, resolve.load("tiny", ["init.from=org/model"]), "identity", "flow run", {})
    held_out = {
        "sequence_length": 256,
        "sources": [{"name": "python-docs", "shards": 1}],
        "validation": [{"path": "tokens/a/validation", "tokens": 1000}],
    }
    with store.artifacts.publish(DatasetStep.id("dataset")) as folder:
        (folder / "corpus.json").write_text(json.dumps(held_out))
        (folder / "shards.json").write_text("[]")
    ledger.record(store, "tiny", "identity", store.artifacts.expect(DatasetStep.id("dataset")))
    return store, Promoted("tiny", "identity", 0, "tokenizer", "dataset")


def test_default_gates_are_rejected_if_the_data_of_the_initial_weights_is_unknown(series, caplog):
    store, promoted = series
    said = "which the series started from, cannot be replayed, so forgetting it is neither prevented nor"
    with pytest.raises(ProfileError, match=r"continual\.gates\.0\.on = old: .*continual\.stand_in"):
        check_gates(store, resolve.load("tiny"), promoted)
    own = resolve.load("tiny", ["continual.gates=[{on: old, rise_at_most: 0.1}]"])
    check_gates(store, own, promoted)
    warn_if_unknown(Context(own, store), promoted)
    assert f"what org/model was trained on, {said} measured" in caplog.text
    caplog.clear()
    with_stand_in = "continual.stand_in=[{kind: files, path: old.jsonl}]"
    for on in ("stand-in", "source:old", "old"):  # of sources that are not read yet
        known = resolve.load("tiny", [with_stand_in, f"continual.gates.0.on={on}"])
        check_gates(store, known, promoted)
    warn_if_unknown(Context(known, store), promoted)
    assert caplog.text == ""


def test_gates_on_text_that_is_shorter_than_a_window_are_reported_before_training():
    """New text will be longer in a later round; text of stand-in sources will not."""
    names = {"first/old": 300, "stand-in/others": 30, "round-1/others": 20}
    contents = {
        "validation": [{"tokens": tokens} for tokens in names.values()],
        "sources": [{"name": name, "shards": 1, "by_hash": True} for name in names],
    }
    sources = "data.sources=[{kind: files, path: more.jsonl}]", "train.sequence_length=256"
    said = "the new data holds out 20 tokens, fewer than one window of 256 + 1"
    for on, reason in (("new", said), ("round-1", said), ("source:more", said), ("old", None)):
        gate = f"continual.gates=[{{on: {on}, rise_at_most: 9}}]"
        assert missing_held_out(resolve.load("tiny", [gate, *sources]), contents, "round-1") == reason
    gate = "continual.gates=[{on: stand-in, rise_at_most: 9}]"
    with pytest.raises(ProfileError, match=r"continual\.gates\.0\.on = stand-in: .* shorter than one window"):
        missing_held_out(resolve.load("tiny", [gate, *sources]), contents, "round-1")


def test_gate_on_an_unknown_task_is_rejected_with_the_nearest_names(series, monkeypatch):
    """The names of lm-eval are made up: listing them takes seconds."""

    def require(tasks, include):
        assert include == Path.cwd() / "mine"
        raise ProfileError("task", tasks[0], "lm-eval has no such task", ["letters"])

    store, promoted = series
    monkeypatch.setattr("flows.verdicts.require_tasks", require)
    gates = "continual.gates=[{on: new, fall_at_least: 0}, {on: task:leters, at_least: 1}]"
    reason = r"continual\.gates\.1\.on = task:leters: lm-eval has no such task; nearest valid: task:letters"
    with pytest.raises(ProfileError, match=reason):
        check_gates(store, resolve.load("tiny", [gates, "continual.include=mine"]), promoted)
