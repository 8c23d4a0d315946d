"""Export of a run that continues to train."""

import json

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from profiles.huggingface.config import TOKEN_IDS, to_config_json
from profiles.resolve import load
from tasks.failures import FatalError
from tasks.step import Context
from tasks.steps import export
from tasks.steps.export import ExportStep
from tasks.store.run_folder import CheckpointId
from tasks.tokenization import tokenizer_files


def test_only_the_checkpoint_of_the_key_is_exported(store, monkeypatch):
    def write(context, checkpoint, tokenizer, weights, folder):
        folder.mkdir()
        (folder / "source.txt").write_text(checkpoint)

    def replace(context, checkpoint, *_):
        run.write(f"{checkpoint}/complete.json", b'{"written": "after a rollback"}')

    monkeypatch.setattr(export, "write_model", write)
    run = store.run_folder("run")
    folder = run.prepare("one")
    for step in (4, 8):
        run.write(f"checkpoints/step_{step}/complete.json", b"{}")
    first = CheckpointId.of(run, 4)
    context = Context(load("tiny", ["train.steps=8"], "run"), store, folder)
    for checkpoint, exported in ((first, "step_4"), (None, "step_8")):
        made = ExportStep(None, f"one {exported}", checkpoint=checkpoint).run(context)
        assert (folder / made.summary["part"] / "source.txt").read_text() == f"checkpoints/{exported}"
    monkeypatch.setattr(export, "write_model", replace)
    with pytest.raises(FatalError, match="run run: the checkpoint of step 4 was replaced during the export"):
        ExportStep(None, "one 4 again", checkpoint=first).run(context)
    assert (folder / made.summary["part"] / "source.txt").read_text() == "checkpoints/step_8"
    with pytest.raises(FatalError, match="run run: the checkpoint of step 2 was removed; export again"):
        ExportStep(None, "one 2", checkpoint=CheckpointId(2, "")).run(context)


@pytest.mark.parametrize(
    ("special", "expected"),
    [
        ({"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": "<pad>"}, [4, 3, 0]),
        ({"eos_token": "</s>"}, [None, 3, None]),
        ({}, [None, None, None]),
    ],
)
def test_transformers_reads_the_special_tokens_of_the_tokenizer_from_an_export(
    store, tmp_path, special, expected
):
    with store.artifacts.publish("tokenizer", "key", {}) as folder:
        vocabulary = {token: i for i, token in enumerate(("<pad>", "a", "b", "</s>", "<s>"))}
        tokenizer_files.write(folder, Tokenizer(models.WordLevel(vocabulary, unk_token="a")), special)
    (tmp_path / "config.json").write_text(json.dumps(to_config_json(load("tiny").model)))
    export.copy_tokenizer(store, store.artifacts.expect("tokenizer", "key"), tmp_path)
    for kind in (AutoConfig, GenerationConfig):
        found = kind.from_pretrained(tmp_path)
        assert [getattr(found, name) for name in TOKEN_IDS] == expected


def test_a_tokenizer_that_transformers_cannot_load_is_not_exported(store, tmp_path):
    with store.artifacts.publish("tokenizer", "key", {"source": "org/name"}) as folder:
        tokenizer_files.write(folder, Tokenizer(models.WordLevel({"a": 0}, unk_token="a")), {})
        # As earlier versions wrote it, the objects without a type, and a file that only tokenizers understands.
        settings = {
            "eos_token": {"content": "a"},
            "bos_token": False,
            "tokenizer_class": "PreTrainedTokenizerFast",
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    artifact = store.artifacts.expect("tokenizer", "key")
    (tmp_path / "config.json").write_text(json.dumps(to_config_json(load("tiny").model)))
    export.copy_tokenizer(store, artifact, tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).eos_token_id == 0
    (store.artifacts.path(artifact) / "tokenizer_config.json").write_text(
        json.dumps({**settings, "added_tokens_decoder": {"0": 1}})
    )
    with pytest.raises(
        FatalError, match="the tokenizer org/name cannot be exported: AutoTokenizer cannot load it"
    ):
        export.copy_tokenizer(store, artifact, tmp_path)
