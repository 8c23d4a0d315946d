"""Tokenizer step: trained, from the hub, a folder or S3; the artifact keeps the source's tokens."""

import io
import json
import logging
import shutil
from contextlib import nullcontext
from itertools import islice

import pytest
from tokenizers import Tokenizer, models

from profiles import resolve
from profiles.errors import ProfileError
from profiles.files import state_files
from tasks.sources import python_docs
from tasks.sources.formats import readers
from tasks.sources.shard import SourceError
from tasks.step import Context
from tasks.steps import tokenizer
from tasks.steps.dataset import DatasetStep
from tasks.steps.tokenizer import TokenizerStep
from tasks.store.store import Store
from tasks.tokenization import tokenizer_files
from tasks.tokenization.chat_templates import ChatTemplate, own_templates
from tasks.tokenization.tokenizer_files import EOS, byte_level
from tests import faults, s3
from tests.hub import TOKEN
from tests.profiles.pair import PAIR

TEXT = [
    "The quick brown fox",
    "jumps  over\n\nthe lazy dog: 12345!",
    " naïve 日本 🙂",
    "",
    "def f(x):\n\treturn x\n",
]


@pytest.fixture
def texts(tmp_path):
    """Overrides for a source of small text files."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for i, text in enumerate(islice(python_docs.documents(), 60)):
        (folder / f"{i}.txt").write_text(text)
    return [f"data.sources=[{{kind: files, path: '{folder}/*.txt'}}]"]


def profile(*overrides):
    return resolve.load(PAIR, overrides)


def from_source(source, *overrides):
    return profile(f"tokenizer.source={source}", *overrides)


@pytest.fixture(scope="module")
def gpt2_files():
    """tokenizer.json, vocab.json and merges.txt of a GPT-2-style tokenizer."""
    from tokenizers import pre_tokenizers, trainers

    tokenizer = byte_level(models.BPE())
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=alphabet, special_tokens=[EOS], show_progress=False
    )
    tokenizer.train_from_iterator(islice(python_docs.documents(), 60), trainer)
    state = json.loads(tokenizer.to_str())
    merges = "\n".join(" ".join(pair) for pair in state["model"]["merges"])
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "vocab.json": json.dumps(state["model"]["vocab"]).encode(),
        "merges.txt": f"#version: 0.2\n{merges}\n".encode(),
    }


@pytest.fixture
def folder(tmp_path):
    """Function that writes files into a folder and returns its path."""

    def write(files, name="source"):
        path = tmp_path / name
        path.mkdir()
        for file, content in files.items():
            (path / file).write_bytes(content)
        return path

    return write


def run(wanted, store, **options):
    return TokenizerStep().run(Context(wanted, store, **options))


def encode(encoder, text):
    return encoder.encode(text, add_special_tokens=False).ids


def test_trained_tokenizer_is_lossless_and_loads_in_transformers(store, texts):
    from transformers import AutoTokenizer

    artifact = run(profile("tokenizer.vocabulary_size=700", *texts), store)
    assert artifact.summary["vocabulary_size"] == 700
    loaded = tokenizer_files.load(store.artifacts.path(artifact))
    in_transformers = AutoTokenizer.from_pretrained(store.artifacts.path(artifact))
    assert artifact.summary["eos"] == loaded.token_to_id(EOS) == in_transformers.eos_token_id
    for text in TEXT:
        ids = encode(loaded, text)
        assert loaded.decode(ids) == text
        assert in_transformers(text, add_special_tokens=False).input_ids == ids


def test_training_is_deterministic_and_skips_held_out_documents(store, tmp_path, texts, monkeypatch):
    overrides = ["tokenizer.vocabulary_size=700", *texts]
    first = store.artifacts.path(run(profile(*overrides), store)) / "tokenizer.json"
    other = Store(str(tmp_path / "other"))
    second = other.artifacts.path(run(profile(*overrides), other)) / "tokenizer.json"
    assert first.read_bytes() == second.read_bytes()
    nothing_left = profile(*overrides, "data.validation_fraction=0.999999")
    with pytest.raises(ProfileError, match="all documents are empty or held out"):
        run(nothing_left, store)
    monkeypatch.setattr(readers, "LONG_FILE", 100)
    with pytest.raises(ProfileError, match="all documents are empty or held out"):
        run(nothing_left, store)
    of_long_files = store.artifacts.path(run(profile(*overrides), store)) / "tokenizer.json"
    assert of_long_files.parent != first.parent


def test_a_source_replaced_after_its_key_was_computed_is_an_error(store, texts, tmp_path, folder, gpt2_files):
    context = Context(profile("tokenizer.vocabulary_size=700", *texts), store)
    key = TokenizerStep().key(context)
    (tmp_path / "texts/0.txt").write_text("other")
    with pytest.raises(SourceError, match=r"0\.txt: has changed since the run's inputs were resolved"):
        TokenizerStep().run(context, key)
    source = folder({"tokenizer.json": gpt2_files["tokenizer.json"]})
    context = Context(from_source(source), store)
    key = TokenizerStep().key(context)
    (source / "config.json").write_text("{}")
    with pytest.raises(ProfileError, match="its files have changed since the run's inputs were resolved"):
        TokenizerStep().run(context, key)
    assert not list((tmp_path / "store/artifacts/tokenizer").glob("*"))


def test_key_depends_on_contents_not_paths(texts, tmp_path, store):
    size = "tokenizer.vocabulary_size=700"
    key = TokenizerStep().key(Context(profile(size, *texts), store))
    assert TokenizerStep().key(Context(profile(size, "train.seed=7", *texts), store)) == key
    assert TokenizerStep().key(Context(profile("tokenizer.vocabulary_size=701", *texts), store)) != key
    (tmp_path / "texts").rename(tmp_path / "moved")
    moved = f"data.sources=[{{kind: files, path: '{tmp_path}/moved/*.txt'}}]"
    assert TokenizerStep().key(Context(profile(size, moved), store)) == key


def test_key_depends_on_which_documents_of_the_text_are_held_out(store, tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name * 100)

    def key(**uses):
        sources = [
            {"kind": "files", "path": f"{tmp_path}/{name}.txt", "use": use} for name, use in uses.items()
        ]
        return TokenizerStep().key(Context(profile(f"data.sources={json.dumps(sources)}"), store))

    assert key(a="split") != key(a="train", b="validation")
    assert len({key(a=a, b=b) for a in ("split", "train") for b in ("split", "train")}) == 4


def test_second_run_reuses_the_artifact(store, texts):
    small = profile("tokenizer.vocabulary_size=700", *texts)
    messages = []
    first = run(small, store, progress=lambda message, fraction: messages.append(message))
    assert messages == ["training a tokenizer of 700 tokens"]
    messages.clear()
    assert run(small, store, progress=lambda message, fraction: messages.append(message)) == first
    assert not messages


@pytest.mark.parametrize(
    ("names", "encoding"),
    [
        ({"tokenizer.json": "tokenizer.json"}, "utf-8-sig"),  # with a byte order mark
        ({"vocab.json": "vocab.json", "merges.txt": "merges.txt"}, "utf-16"),
        ({"vocab.json": "gpt2-vocab.json", "merges.txt": "gpt2-merges.txt"}, "utf-8"),
    ],
)
def test_every_file_format_gives_the_same_tokens(store, folder, gpt2_files, names, encoding):
    from transformers import AutoTokenizer

    files = {new: gpt2_files[old] for old, new in names.items()} | {"special_tokens_map.json": b"{}"}
    source = folder({name: content.decode().encode(encoding) for name, content in files.items()})
    artifact = run(from_source(source), store)
    original = Tokenizer.from_str(gpt2_files["tokenizer.json"].decode())
    loaded = tokenizer_files.load(store.artifacts.path(artifact))
    in_transformers = AutoTokenizer.from_pretrained(store.artifacts.path(artifact))
    for text in TEXT:
        assert (
            encode(loaded, text)
            == encode(original, text)
            == in_transformers(text, add_special_tokens=False).input_ids
        )
    assert in_transformers.eos_token == EOS
    assert artifact.summary["eos"] == in_transformers.eos_token_id
    assert artifact.summary["vocabulary_size"] == 600


def test_sentencepiece_model_gives_the_tokens_of_sentencepiece(store, tmp_path):
    import sentencepiece
    from transformers import AutoTokenizer

    model = io.BytesIO()
    documents = list(islice(python_docs.documents(), 150))
    sentencepiece.SentencePieceTrainer.train(  # Llama 2's settings
        sentence_iterator=iter(text.replace("\n", " ") for text in documents),
        model_writer=model,
        vocab_size=1000,
        model_type="bpe",
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    source = tmp_path / "llama"
    source.mkdir()
    (source / "tokenizer.model").write_bytes(model.getvalue())
    artifact = run(from_source(source), store)
    reference = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    loaded = tokenizer_files.load(store.artifacts.path(artifact))
    for text in [*TEXT, " leading", "   ", *documents]:
        assert encode(loaded, text) == reference.encode(text)
        assert loaded.decode(reference.encode(text)) == text
    in_transformers = AutoTokenizer.from_pretrained(store.artifacts.path(artifact))
    assert in_transformers("A fox").input_ids == [reference.bos_id(), *reference.encode("A fox")]
    summary = artifact.summary
    assert (summary["vocabulary_size"], summary["bos"], summary["eos"]) == (1000, 1, 2)


def test_truncation_and_padding_of_the_source_are_disabled(store, folder, gpt2_files):
    cutting = Tokenizer.from_str(gpt2_files["tokenizer.json"].decode())
    cutting.enable_truncation(4)
    cutting.enable_padding(length=4)
    source = folder({"tokenizer.json": cutting.to_str().encode()})
    loaded = tokenizer_files.load(store.artifacts.path(run(from_source(source), store)))
    assert len(encode(loaded, TEXT[0] * 9)) > 4
    assert len(encode(loaded, "a")) == 1


@pytest.mark.parametrize(
    "files",
    [
        {
            "tokenizer_config.json": {
                "eos_token": {"content": "dog", "__type": "AddedToken"},
                "auto_map": {"x": "y"},
            }
        },
        {"tokenizer_config.json": {"eos_token": {"content": "dog", "id": 300}, "pad_token": False}},
        {"special_tokens_map.json": {"eos_token": "dog"}},
        {
            "tokenizer_config.json": {"eos_token": False, "unk_token": None},
            "special_tokens_map.json": {
                "eos_token": {"content": "dog", "lstrip": False, "normalized": False},
                "cls_token": {"content": "dog"},
                "additional_special_tokens": [{"content": "dog"}, "not in the vocabulary"],
            },
        },
        {"config.json": {"eos_token_id": [300], "pad_token_id": -1}},
        # transformers prefers special_tokens_map.json, unless the other file lists its added tokens
        {"tokenizer_config.json": {"eos_token": EOS}, "special_tokens_map.json": {"eos_token": "dog"}},
        {
            "tokenizer_config.json": {"eos_token": "dog", "added_tokens_decoder": {}},
            "special_tokens_map.json": {"eos_token": EOS},
        },
    ],
)
def test_special_tokens_of_the_source_are_read_and_load_in_transformers(store, folder, gpt2_files, files):
    from transformers import AutoTokenizer

    state = json.loads(gpt2_files["tokenizer.json"])
    token = next(token for token, i in state["model"]["vocab"].items() if i == 300)
    files = {
        name: json.dumps(content).replace('"dog"', json.dumps(token)).encode()
        for name, content in files.items()
    }
    artifact = run(from_source(folder({"tokenizer.json": gpt2_files["tokenizer.json"], **files})), store)
    path = store.artifacts.path(artifact)
    loaded = AutoTokenizer.from_pretrained(path)
    assert artifact.summary["eos"] == loaded.eos_token_id == 300
    assert len(loaded) == 600
    assert "auto_map" not in (path / "tokenizer_config.json").read_text()


def test_exported_tokenizer_is_not_rejected_if_its_files_cannot_be_read_at_first(
    store, folder, gpt2_files, tmp_path, monkeypatch
):
    """transformers takes a file whose status it cannot read for a missing one."""
    artifact = run(from_source(folder({"tokenizer.json": gpt2_files["tokenizer.json"]})), store)
    export = shutil.copytree(store.artifacts.path(artifact), tmp_path / "export")
    (export / "config.json").write_text("{}")
    monkeypatch.setattr(state_files, "DELAYS", (0.0,) * 3)
    faults.inject(monkeypatch, export, faults.AtFirst())
    tokenizer_files.check_loads(export)


def test_special_token_that_is_no_text_is_rejected(store, folder, gpt2_files):
    files = {"tokenizer.json": gpt2_files["tokenizer.json"], "tokenizer_config.json": b'{"eos_token": 7}'}
    with pytest.raises(
        ProfileError, match=r"tokenizer_config\.json cannot be read: eos_token is 7, neither a text"
    ):
        run(from_source(folder(files)), store)


@pytest.mark.parametrize("declares", ["added_tokens.json", "tokenizer_config.json"])
@pytest.mark.parametrize("vocabulary", ["vocab.json", "tokenizer.json"])
def test_added_tokens_that_only_other_files_declare_are_recognized(
    store, folder, gpt2_files, declares, vocabulary
):
    from transformers import AutoTokenizer

    def source(ids, name):
        content = {"added_tokens_decoder": {i: {"content": token} for token, i in ids.items()}}
        content = ids if declares == "added_tokens.json" else content
        names = [vocabulary] if vocabulary == "tokenizer.json" else [vocabulary, "merges.txt"]
        files = {each: gpt2_files[each] for each in names}
        return from_source(folder({**files, declares: json.dumps(content).encode()}, name))

    path = store.artifacts.path(run(source({"</think>": 601, "<think>": 600, EOS: 0}, "valid"), store))
    for encoder in tokenizer_files.load(path), AutoTokenizer.from_pretrained(path)._tokenizer:
        ids = encode(encoder, "a<think> b</think>")
        assert (ids.index(600), ids[-1]) == (1, 601)
    with pytest.raises(
        ProfileError, match=r"'<think>' has id 700, which tokenizers would not give it but 600"
    ):
        run(source({"<think>": 700}, "with a gap"), store)


def test_added_tokens_whose_ids_tokenizers_would_change_are_rejected(store, folder, gpt2_files):
    state = json.loads(gpt2_files["tokenizer.json"])
    state["added_tokens"].append(
        {**state["added_tokens"][0], "id": 700, "content": "<think>", "special": False}
    )
    with pytest.raises(
        ProfileError, match=r"'<think>' has id 700, and tokenizers gives it 600; list the added"
    ):
        run(from_source(folder({"tokenizer.json": json.dumps(state).encode()})), store)


def test_hub_revision_is_pinned_and_only_tokenizer_files_are_fetched(store, hub, gpt2_files):
    files = {
        "tokenizer.json": gpt2_files["tokenizer.json"],
        "model.safetensors": b"weights",
        "code.py": b"raise",
    }
    pinned = hub.commit("org/name", files)
    newest = hub.commit("org/name", {**files, "README.md": b"newer"})
    artifact = run(from_source("org/name", f"tokenizer.revision={pinned}"), store)
    assert artifact.summary["revision"] == pinned
    assert (store.artifacts.path(artifact) / "tokenizer.json").read_bytes() == files["tokenizer.json"]
    read = {path.rpartition("/")[2] for _, path, _ in hub.requests if "/resolve/" in path}
    assert read == {"tokenizer.json"}
    latest = run(from_source("org/name"), store)  # no revision: resolved to the latest commit
    assert latest.summary["revision"] == newest
    assert latest.key != artifact.key


def test_chat_templates_of_all_names_are_read_from_hub_and_folder(store, hub, gpt2_files, tmp_path):
    from transformers import AutoTokenizer

    names = {
        "default": "chat_template.jinja",
        **{each: f"additional_chat_templates/{each}.jinja" for each in ("rag", "tool_use")},
    }
    files = {file: f"{name}: {{{{ tools }}}}".encode() for name, file in names.items()}
    files |= {
        "tokenizer.json": gpt2_files["tokenizer.json"],
        "tokenizer_config.json": b'{"chat_template": "old"}',
    }
    local = tmp_path / "local"
    for name, data in files.items():
        (local / name).parent.mkdir(parents=True, exist_ok=True)
        (local / name).write_bytes(data)
    hub.commit("org/name", files)
    for source in ("org/name", local):
        artifact = run(from_source(source), store)
        path = store.artifacts.path(artifact)
        found = own_templates(path)
        assert artifact.summary["templates"] == [*found] == [*names]
        assert found == AutoTokenizer.from_pretrained(path).chat_template
        assert found == AutoTokenizer.from_pretrained(local).chat_template
        template = ChatTemplate(path)
        assert [template.render([], tools=tools) for tools in (None, [])] == ["default: None", "tool_use: []"]
    (local / names["rag"]).write_text("other")
    assert run(from_source(local), store).key != artifact.key


def test_pinned_tokenizer_in_the_store_needs_no_hub(store, hub, gpt2_files):
    pinned = hub.commit("org/name", {"tokenizer.json": gpt2_files["tokenizer.json"]})
    wanted = from_source("org/name", f"tokenizer.revision={pinned}")
    first = run(wanted, store)
    hub.requests.clear()
    assert run(wanted, store) == first
    assert not hub.requests


def test_gated_repository_needs_a_token_which_is_never_logged(store, hub, gpt2_files, caplog, monkeypatch):
    caplog.set_level(logging.DEBUG)
    pinned = hub.commit("org/gated", {"tokenizer.json": gpt2_files["tokenizer.json"]}, gated=True)
    wanted = from_source("org/gated", f"tokenizer.revision={pinned}")
    with pytest.raises(ProfileError, match=r"tokenizer\.source = org/gated: is gated.*HF_TOKEN"):
        run(wanted, store)
    artifact = run(wanted, store, token=TOKEN)
    assert {token for _, _, token in hub.requests if token} == {TOKEN}
    shown = [caplog.text, str(artifact), *(f.read_text() for f in store.artifacts.path(artifact).iterdir())]
    assert not any(TOKEN in text for text in shown)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    again = hub.commit("org/gated", {"tokenizer.json": gpt2_files["tokenizer.json"], "a": b""}, gated=True)
    artifact = run(from_source("org/gated", f"tokenizer.revision={again}"), store)
    assert artifact.summary["revision"] == again


@pytest.mark.parametrize(
    ("source", "revision", "message"),
    [
        (
            "org/missing",
            None,
            r"tokenizer\.source = org/missing: is neither a local folder nor a hub repository",
        ),
        (
            "org/name",
            "no-such-branch",
            r"tokenizer\.revision = no-such-branch: org/name has no such revision",
        ),
        ("./missing", None, r"tokenizer\.source = \./missing: folder does not exist"),
        ("org/weights", None, r"tokenizer\.source = org/weights: contains config\.json; a tokenizer needs"),
    ],
)
def test_source_without_a_tokenizer_is_rejected(store, hub, gpt2_files, source, revision, message):
    hub.commit("org/name", {"tokenizer.json": gpt2_files["tokenizer.json"]})
    hub.commit("org/weights", {"config.json": b"{}"})
    with pytest.raises(ProfileError, match=message):
        run(from_source(source, f"tokenizer.revision={revision or 'null'}"), store)


def test_corrupted_tokenizer_is_rejected_by_file_name(store, folder, gpt2_files):
    with pytest.raises(ProfileError, match=r"tokenizer\.json cannot be read"):
        run(from_source(folder({"tokenizer.json": b'{"version": 1'})), store)
    with pytest.raises(ProfileError, match=r"tokenizer\.model cannot be read"):
        run(from_source(folder({"tokenizer.model": b"\xff\xff"}, "other")), store)
    for name, content in ("tokenizer_config.json", b""), ("config.json", b"[]"):
        files = {"tokenizer.json": gpt2_files["tokenizer.json"], name: content}
        with pytest.raises(ProfileError, match=rf"tokenizer\.source = .*: {name} cannot be read: "):
            run(from_source(folder(files, f"with {name}")), store)


def test_tokenizer_without_eos_is_rejected_if_append_eos_is_set(store, folder, texts):
    source = folder({"tokenizer.json": Tokenizer(models.WordLevel({"a": 0, "?": 1}, "?")).to_str().encode()})
    for append, message in (
        ("false", None),
        ("true", r"data\.append_eos = true: .*/source has no EOS token"),
    ):
        wanted = from_source(source, f"data.append_eos={append}", *texts)
        loaded = run(wanted, store)
        assert loaded.summary["eos"] is None
        with pytest.raises(ProfileError, match=message) if message else nullcontext():
            DatasetStep(loaded).key(Context(wanted, store))


def test_tokenizer_larger_than_the_embedding_is_rejected(store, folder, gpt2_files):
    source = folder({"tokenizer.json": gpt2_files["tokenizer.json"]})
    small = from_source(source, "model.vocab_size=599")
    artifact = run(small, store)
    with pytest.raises(ProfileError, match=r"model\.vocab_size = 599: the tokenizer has 600 tokens.*600"):
        tokenizer.check_fits(small, artifact.summary)
    tokenizer.check_fits(from_source(source, "model.vocab_size=600"), artifact.summary)


@pytest.mark.s3
def test_tokenizer_folder_on_s3_is_read(store, gpt2_files, monkeypatch):
    import fsspec

    with s3.bucket(monkeypatch) as bucket:
        for name in "vocab.json", "merges.txt":
            with fsspec.open(f"{bucket}/tokenizers/ours/{name}", "wb") as file:
                file.write(gpt2_files[name])
        artifact = run(from_source(f"{bucket}/tokenizers/ours"), store)
        with pytest.raises(ProfileError, match=r"tokenizers/none: folder does not exist"):
            run(from_source(f"{bucket}/tokenizers/none"), store)
    assert artifact.summary["vocabulary_size"] == 600
