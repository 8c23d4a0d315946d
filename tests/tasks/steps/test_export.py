"""Exports: checkpoint, tokenizer, chat template, generation config; all families generate from them."""

import json
import logging
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LogitsProcessor

from modeling.conversion.convert import Options, convert
from profiles.huggingface.config import TOKEN_IDS, to_config_json
from profiles.resolve import load
from tasks.failures import FatalError
from tasks.step import Context
from tasks.steps import export
from tasks.steps.export import ExportStep
from tasks.store.artifacts import ArtifactId
from tasks.store.run_folder import CheckpointId
from tasks.tokenization import chat_templates, tokenizer_files
from tests.modeling.conversion.test_convert import MODELS, save


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
    with store.artifacts.publish(ArtifactId("tokenizer", "key"), {}) as folder:
        vocabulary = {token: i for i, token in enumerate(("<pad>", "a", "b", "</s>", "<s>"))}
        tokenizer_files.write(folder, Tokenizer(models.WordLevel(vocabulary, unk_token="a")), special)
    (tmp_path / "config.json").write_text(json.dumps(to_config_json(load("tiny").model)))
    export.copy_tokenizer(store, store.artifacts.expect(ArtifactId("tokenizer", "key")), tmp_path)
    for kind in (AutoConfig, GenerationConfig):
        found = kind.from_pretrained(tmp_path)
        assert [getattr(found, name) for name in TOKEN_IDS] == expected


def test_a_tokenizer_that_transformers_cannot_load_is_not_exported(store, tmp_path):
    with store.artifacts.publish(ArtifactId("tokenizer", "key"), {"source": "org/name"}) as folder:
        tokenizer_files.write(folder, Tokenizer(models.WordLevel({"a": 0}, unk_token="a")), {})
        # As earlier versions wrote it, the objects without a type, and a file that only tokenizers understands.
        settings = {
            "eos_token": {"content": "a"},
            "bos_token": False,
            "tokenizer_class": "PreTrainedTokenizerFast",
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    artifact = store.artifacts.expect(ArtifactId("tokenizer", "key"))
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


TEMPLATES = Path("tests/fixtures/chat_templates")
# Others have that of their name, or chatml. GLM-4's own ends answers with no token.
TEMPLATE_OF = {
    "llama": "llama3.1",
    "qwen3_moe": "qwen3",
    "ministral": "mistral-small",
    "olmo3": "olmo2",
    "glm4": "chatml",
}
WORDS = {word: i for i, word in enumerate(("?", "user", "assistant", "stones", "forty", "</s>", "<s>"))}


def publish_tokenizer(store, source=""):
    """A tokenizer of a few words, with the markers of a chat template."""
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(
        sorted({*chat_templates.MARKER.findall(source), "<end_of_turn>", "<s>", "</s>"})
    )
    with store.artifacts.publish(ArtifactId("tokenizer", "chat"), {}) as made:
        tokenizer_files.write(made, tokenizer, {"bos_token": "<s>", "eos_token": "</s>"})
    return store.artifacts.expect(ArtifactId("tokenizer", "chat")), tokenizer


class Emit(LogitsProcessor):
    """Makes a model emit one token only."""

    def __init__(self, token: int) -> None:
        self.token = torch.tensor([token])

    def __call__(self, ids, scores):
        return scores.index_fill(1, self.token, 1e9)


@pytest.mark.parametrize(
    "name", [name for name in MODELS if name not in ("llama, tied", "llama, biases", "gpt, untied")]
)
def test_an_answer_generated_from_an_export_stops_at_the_end_of_its_turn(store, tmp_path, name):
    family = name.partition(",")[0]
    source = TEMPLATES / f"{TEMPLATE_OF.get(family, family)}.jinja"
    file = tmp_path / "chat.jinja"
    file.write_text(source.read_text() if source.exists() else chat_templates.CHATML)
    save(MODELS[name](), tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "run", Options("trainshed"))
    folder = tmp_path / "export"
    convert(tmp_path / "run", folder, Options("hf"))
    published, tokenizer = publish_tokenizer(store, file.read_text())
    profile = load("tiny-sft", [f"objective.template={file}"])
    export.copy_tokenizer(store, published, folder, profile)

    model, theirs = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    asked, answered = {"role": "user", "content": "stones"}, {"role": "assistant", "content": "forty"}
    whole = theirs.apply_chat_template([asked, answered], tokenize=False)
    end = tokenizer.encode(whole.rstrip(), add_special_tokens=False).ids[-1]
    assert tokenizer.id_to_token(end) in (
        "<|eot_id|>",
        "</s>",
        "<|im_end|>",
        "<|return|>",
        "<｜end▁of▁sentence｜>",
        "<end_of_turn>",
        "<|end_of_text|>",
    )
    assert theirs.eos_token_id in torch.tensor(model.generation_config.eos_token_id)
    inputs = theirs.apply_chat_template(
        [[asked], [{**asked, "content": "stones stones"}]],
        add_generation_prompt=True,
        return_tensors="pt",
        padding=True,
    )
    for token, count in ((end, 1), (WORDS["forty"], 3)):
        made = model.generate(**inputs, max_new_tokens=3, logits_processor=[Emit(token)], do_sample=False)
        assert made.shape[1] == inputs["input_ids"].shape[1] + count


def test_a_generation_config_is_kept_but_for_what_training_changes(store, tmp_path, caplog):
    published, tokenizer = publish_tokenizer(store, chat_templates.CHATML)
    start, end, eos, bos = map(tokenizer.token_to_id, ("<|im_start|>", "<|im_end|>", "</s>", "<s>"))

    def exported(given, *overrides):
        folder = tmp_path / f"{len([*tmp_path.iterdir()])}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(to_config_json(load("tiny").model)))
        export.copy_tokenizer(store, published, folder, load("tiny-sft", overrides), None, given)
        found = json.loads((folder / "generation_config.json").read_text())
        assert json.loads((folder / "config.json").read_text())["eos_token_id"] == found["eos_token_id"]
        return found

    given = {
        "temperature": 0.6,
        "do_sample": True,
        "eos_token_id": [eos, 3],
        "pad_token_id": 3,
        "_from_model_config": True,
    }
    ids = {"bos_token_id": bos, "pad_token_id": 3}
    assert exported(given) == {"temperature": 0.6, "do_sample": True, **ids, "eos_token_id": [eos, 3]}
    assert exported(given, "objective.template=chatml")["eos_token_id"] == [eos, 3, end]
    assert exported({}, "objective.template=chatml") == {
        **ids,
        "eos_token_id": [eos, end],
        "pad_token_id": eos,
    }
    assert exported({"eos_token_id": [eos]})["eos_token_id"] == [eos]
    assert exported({"eos_token_id": eos})["eos_token_id"] == eos
    with caplog.at_level(logging.WARNING):  # ids of another tokenizer
        assert exported({"eos_token_id": [start, 3], "pad_token_id": 3})["eos_token_id"] == [start, eos]
    assert "eos_token_id [3] is dropped" in caplog.text
