"""From documents to tokens: whichever engine, however long a text, however many processes, and what is left out."""

import json
import logging
import random
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from profiles.errors import ProfileError
from tasks.dataset import DatasetStep
from tasks.sources import long_text
from tasks.sources.long_text import TextSplitter
from tasks.sources.shard import SourceError
from tasks.step import Context
from tasks.store.store import Store
from tasks.tokenization import engines, tokenize_shard, tokenizer_files
from tasks.tokenization.dataset_plan import DatasetPlan
from tasks.tokenization.tokenizer_files import EOS, byte_level
from tasks.tokenization.worker_pool import WorkerFailed, WorkerPool
from tasks.tokenizer import TokenizerStep
from tests.modeling.data.datasets import read_sequences
from tests.tasks.source_files import files, lines, profile

CHANCE = random.Random(0)
WORDS = [
    "the",
    "Ελλάδα",
    "naïve",
    "it's",
    "2024",
    "x=1;",
    "日本語。",
    "don't",
    "a",
    "und",
    "…",
    "  ",
    "\t",
    "3.14",
]
ENDS = [" ", " ", " ", "\n", "\n\n", ". ", ", ", "\r\n"]
PROSE = "".join(CHANCE.choice(WORDS) + CHANCE.choice(ENDS) for _ in range(20_000))
DOCUMENTS = [PROSE[at : at + 300] for at in range(0, 60_000, 300)]


def make(wanted, store, **more):
    context = Context(wanted, store, **more)
    return DatasetStep(TokenizerStep().run(context)).run(context)


def documents_of(artifact, store, split="train"):
    corpus = json.loads((store.artifacts.path(artifact) / "corpus.json").read_text())
    artifacts = store.artifacts.path(artifact).parent.parent
    return [
        document.tolist() for shard in corpus[split] for document in read_sequences(artifacts / shard["path"])
    ]


def gpt2():
    return byte_level(models.BPE())


def llama3():
    made = Tokenizer(models.BPE())
    words = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    return made


def metaspace():
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    return made


def llama2():
    """No pre-tokenizer, as SentencePiece's has none: trained with one, which is then taken away."""
    made = trained(metaspace(), special=["<unk>"])
    made.pre_tokenizer = None
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return made


def deepseek():
    """DeepSeek Coder's words: cut in turns, digits one by one."""
    made = Tokenizer(models.BPE())
    turns = [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+"]
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(turn), "isolated") for turn in turns),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return made


def trained(made, special=(EOS,)):
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([PROSE], trainer)
    return made


@pytest.mark.parametrize("kind", [gpt2, llama3, metaspace, llama2])
def test_a_text_in_pieces_has_the_tokens_of_the_whole(kind, monkeypatch):
    made = kind() if kind is llama2 else trained(kind(), ["<unk>"] if kind is metaspace else [EOS])
    monkeypatch.setattr(long_text, "SEGMENT", 2000)
    pieces = list(TextSplitter(made).split(long_text.of_text(PROSE)))
    assert len(pieces) > 10
    joined = [token for piece in pieces for token in made.encode(piece, add_special_tokens=False).ids]
    assert joined == made.encode(PROSE, add_special_tokens=False).ids


@pytest.fixture(scope="module", params=[gpt2, llama3, deepseek])
def whole_words(request):
    return trained(request.param())


CSV = "".join(f"{CHANCE.random():.6},{CHANCE.randrange(10**9)},2024-01-{i % 28:02}\n" for i in range(2000))
JSON = json.dumps([{"a": i / 7, "b": [i, {"c-d": "1"}]} for i in range(900)], indent=4)
CODE = "".join(f"\tif (x[{i}] != 0x{i:04x}) {{\n\t\ty += {i};  // {i}!\n\t}}\n" for i in range(900))


@pytest.mark.parametrize("text", [CSV, JSON, CODE], ids=["csv", "json", "code"])
@pytest.mark.parametrize("kind", [gpt2, llama3, deepseek, metaspace, llama2])
def test_numbers_and_code_are_cut_as_well(kind, text, monkeypatch):
    made = kind() if kind is llama2 else trained(kind(), ["<unk>"] if kind is metaspace else [EOS])
    monkeypatch.setattr(long_text, "SEGMENT", 2000)
    pieces = list(TextSplitter(made).split(long_text.of_text(text)))
    without_spaces = text is CSV and kind in (metaspace, llama2)  # one word, to them
    assert max(map(len, pieces)) < (len(text) + 1 if without_spaces else 2600)
    joined = [token for piece in pieces for token in made.encode(piece, add_special_tokens=False).ids]
    assert joined == made.encode(text, add_special_tokens=False).ids


@settings(max_examples=60)
@given(
    runs=st.lists(
        st.tuples(st.sampled_from(["1", "-", " ", "\n", "'s", "a", "B", "é", "日", ",\n", "\r\n", "12 "]),
                  st.sampled_from([1, 2, 3, 40, 97])),
        min_size=10, max_size=40,
    )
)  # fmt: skip
def test_a_text_of_long_runs_in_pieces_has_the_tokens_of_the_whole(whole_words, runs):
    text = "".join(part * count for part, count in runs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_text, "SEGMENT", 150)
        patch.setattr(long_text, "WINDOW", 64)  # shorter than some of the runs
        pieces = list(TextSplitter(whole_words).split(long_text.of_text(text)))
    joined = [token for piece in pieces for token in whole_words.encode(piece, add_special_tokens=False).ids]
    assert joined == whole_words.encode(text, add_special_tokens=False).ids


def test_a_text_without_a_place_to_cut_stays_whole(monkeypatch):
    monkeypatch.setattr(long_text, "SEGMENT", 1000)
    text = "a" * 9000
    assert list(TextSplitter(trained(gpt2())).split(long_text.of_text(text))) == [text]


def test_a_vocabulary_whose_words_reach_over_spaces_is_never_cut(monkeypatch):
    monkeypatch.setattr(long_text, "SEGMENT", 1000)
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained(made, ["<unk>"])  # words of several words, for want of a pre-tokenizer
    assert len(list(TextSplitter(made).split(long_text.of_text(PROSE)))) == 1


def test_long_documents_have_their_tokens_in_order_with_the_short_ones(store, tmp_path, monkeypatch):
    texts = [*DOCUMENTS[:20], PROSE, *DOCUMENTS[20:40], PROSE[9:]]
    (tmp_path / "a.jsonl").write_bytes(lines(texts))
    wanted = profile(files(tmp_path / "a.jsonl"), validation_fraction=0)
    whole = documents_of(make(wanted, store), store)
    monkeypatch.setattr(tokenize_shard, "BATCH", 5000)
    monkeypatch.setattr(long_text, "SEGMENT", 2000)
    other = Store(str(tmp_path / "other"))
    assert documents_of(make(wanted, other), other) == whole


@pytest.mark.parametrize("kind", [gpt2, llama3])
def test_the_fast_engine_takes_byte_level_tokenizers_and_gives_the_same_tokens(kind):
    pytest.importorskip("gigatoken", reason="gigatoken is not installed")
    made = trained(kind())
    made.encode_special_tokens = True
    fast = engines.choose(made, DOCUMENTS[:5])
    assert fast.name == "gigatoken"
    for mine, other in zip(fast.encode(DOCUMENTS), engines.General(made).encode(DOCUMENTS), strict=True):
        assert np.array_equal(mine, other)


def unsplit():
    """As Llama 2's is written now: a mark before the text, and no cuts."""
    made = llama2()
    made.normalizer, made.pre_tokenizer = None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return made


@pytest.fixture(scope="module", params=[gpt2, llama3, deepseek, metaspace, llama2, unsplit])
def by_words(request):
    """The engine that goes by few words, which it soon forgets, and the one that takes texts whole, of one tokenizer."""
    made = request.param()
    if request.param not in (llama2, unsplit):  # which have their vocabulary
        trained(made, ["<unk>"] if request.param is metaspace else [EOS])
    made.encode_special_tokens = True
    # Not special: they are recognized in texts.
    made.add_tokens([AddedToken(text, normalized=False) for text in ("<pad>", "   ")])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tasks.tokenization.word_cache.MOST", 5)
        yield engines.ByWords(made, 1), engines.General(made)


@settings(max_examples=300)
@given(
    texts=st.lists(st.one_of(st.text(), st.text("a1 \t\n\r'sSſlL.<pad>▁é日\x1c\x85\u2028٣Ⅷ²")), max_size=4)
)
def test_texts_by_words_have_the_tokens_of_the_whole(by_words, texts):
    for mine, other in zip(*(engine.encode(texts) for engine in by_words), strict=True):
        assert np.array_equal(mine, other)


def test_without_gigatoken_words_that_come_again_are_tokenized_once(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    made = trained(gpt2())
    made.encode_special_tokens = True
    engine = engines.choose(made, DOCUMENTS[:5])
    assert engine.name == "tokenizers by words"
    for mine, other in zip(engine.encode(DOCUMENTS), engines.General(made).encode(DOCUMENTS), strict=True):
        assert np.array_equal(mine, other)
    with caplog.at_level(logging.INFO):
        assert engines.choose(made, DOCUMENTS[:5], threads=16).name == "tokenizers"
        over_spaces = Tokenizer(models.BPE(unk_token="<unk>"))
        over_spaces.normalizer = llama2().normalizer
        assert engines.choose(trained(over_spaces, ["<unk>"]), DOCUMENTS[:5]).name == "tokenizers"
        over_spaces.normalizer = normalizers.NFKC()
        assert engines.choose(over_spaces, DOCUMENTS[:5]).name == "tokenizers"
    assert "16 threads of tokenizers are faster" in caplog.text
    assert "its tokens may reach over spaces" in caplog.text
    assert "it changes the text first" in caplog.text


@pytest.mark.parametrize("kind", [metaspace, llama2, unsplit])
def test_words_that_begin_with_their_space_are_tokenized_once_too(kind, monkeypatch):
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    made = trained(kind(), ["<unk>"]) if kind is metaspace else kind()
    made.encode_special_tokens = True
    engine = engines.choose(made, DOCUMENTS[:60])
    assert engine.name == "tokenizers by words"
    for mine, other in zip(engine.encode(DOCUMENTS), engines.General(made).encode(DOCUMENTS), strict=True):
        assert np.array_equal(mine, other)


def test_a_fast_engine_that_differs_is_not_used_and_that_is_said(caplog, monkeypatch):
    made = trained(gpt2())
    made.encode_special_tokens = True
    monkeypatch.setattr(engines.Fast, "_encode", lambda self, texts: (np.zeros(9, np.uint32), np.array([9])))
    with caplog.at_level(logging.INFO):
        assert engines.choose(made, DOCUMENTS[:5]).name == "tokenizers by words"
    assert "not tokenizing with gigatoken: " in caplog.text
    assert "different tokens" in caplog.text


def test_a_fast_engine_that_goes_wrong_later_has_its_shard_made_again(store, tmp_path, monkeypatch, caplog):
    pytest.importorskip("gigatoken", reason="gigatoken is not installed")
    (tmp_path / "a.jsonl").write_bytes(lines(DOCUMENTS))
    wanted = profile(files(tmp_path / "a.jsonl"), validation_fraction=0)
    right = documents_of(make(wanted, store), store)
    monkeypatch.setattr(tokenize_shard, "BATCH", 5000)
    honest = engines.Fast._encode

    def wrong_after_the_first(self, texts):
        ids, counts = honest(self, texts)
        return (ids, counts) if DOCUMENTS[0] in texts else (ids[::-1], counts)

    monkeypatch.setattr(engines.Fast, "_encode", wrong_after_the_first)
    other = Store(str(tmp_path / "other"))
    with caplog.at_level(logging.INFO):
        assert documents_of(make(wanted, other), other) == right
    assert "it is tokenized again with tokenizers" in caplog.text


def test_special_tokens_written_in_a_text_are_text(store, tmp_path):
    texts = [f"before {EOS} after{EOS}", *DOCUMENTS]
    (tmp_path / "a.jsonl").write_bytes(lines(texts))
    wanted = profile(files(tmp_path / "a.jsonl"), validation_fraction=0)
    words = TokenizerStep().run(Context(wanted, store))
    made = documents_of(DatasetStep(words).run(Context(wanted, store)), store)
    eos = words.summary["eos"]
    assert all(document.count(eos) == 1 and document[-1] == eos for document in made)
    assert (
        tokenizer_files.load(store.artifacts.path(words)).decode(made[0][:-1], skip_special_tokens=False)
        == texts[0]
    )


def test_bos_and_eos_stand_where_they_are_asked_for(store, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines(DOCUMENTS))
    source = files(tmp_path / "a.jsonl")
    words = TokenizerStep().run(Context(profile(source), store))
    bos, eos = words.summary["bos"], words.summary["eos"]

    def made(**options):
        return documents_of(DatasetStep(words).run(Context(profile(source, **options), store)), store)

    plain = made(append_eos=False)
    assert made(prepend_bos=True) == [[bos, *document, eos] for document in plain]
    assert made(prepend_bos=True, append_eos=False) == [[bos, *document] for document in plain]


def test_duplicates_short_texts_and_missing_ones_are_left_out_and_counted(store, tmp_path):
    first, second = DOCUMENTS[:60], [*DOCUMENTS[50:120], DOCUMENTS[119], "short", "short"]
    (tmp_path / "a.jsonl").write_bytes(lines(first))
    (tmp_path / "b.jsonl").write_bytes(lines([*second, "half a pair: \ud800"]) + b'{"n": 1}\n')
    source = files(tmp_path / "*.jsonl")
    options = {"deduplicate": True, "minimum_length": 6, "validation_fraction": 0}
    words = TokenizerStep().run(Context(profile(source, **options), store))
    artifact = DatasetStep(words).run(Context(profile(source, **options), store))
    summary = artifact.summary
    assert (summary["documents"], summary["duplicates"], summary["short"]) == (120, 12, 1)
    assert summary["missing"] == 2
    report = json.loads((store.artifacts.path(artifact) / "report.json").read_text())
    assert report[0]["duplicates"] == 12
    assert report[0]["bytes_per_token"] > 1
    whole = [*first, *DOCUMENTS[60:120]]
    (tmp_path / "c.jsonl").write_bytes(lines(whole))
    other = profile(files(tmp_path / "c.jsonl"), validation_fraction=0)
    assert documents_of(artifact, store) == documents_of(DatasetStep(words).run(Context(other, store)), store)


def test_data_that_repeats_others_makes_only_the_shards_again_that_lose_a_document(store, tmp_path):
    for name, part in ("a", DOCUMENTS[:50]), ("c", DOCUMENTS[50:100]), ("d", DOCUMENTS[100:150]):
        (tmp_path / f"{name}.jsonl").write_bytes(lines(part))
    wanted = profile(files(tmp_path / "*.jsonl"), deduplicate=True, validation_fraction=0)
    words = TokenizerStep().run(Context(wanted, store))
    DatasetStep(words).run(Context(wanted, store))
    before = {path.name for path in (tmp_path / "store/artifacts/tokens").iterdir()}
    (tmp_path / "b.jsonl").write_bytes(lines([DOCUMENTS[120], "something else entirely"]))
    artifact = DatasetStep(words).run(Context(wanted, store))
    after = {path.name for path in (tmp_path / "store/artifacts/tokens").iterdir()}
    assert len(after - before) == 2  # b itself, and d without the document that b has now
    assert artifact.summary["documents"] == 151


def test_too_many_records_without_text_stop_the_step(store, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines([*DOCUMENTS, *[None] * 60]))
    source = files(tmp_path / "a.jsonl")
    words = TokenizerStep().run(Context(profile(source), store))
    with pytest.raises(ProfileError, match=r"maximum_missing = 0\.1: .*60 records without text of 260"):
        DatasetStep(words).run(Context(profile(source), store))
    assert (
        DatasetStep(words).run(Context(profile(source, maximum_missing=0.3), store)).summary["missing"] == 60
    )


def many(tmp_path, count=5):
    for i in range(count):
        (tmp_path / f"{i}.jsonl").write_bytes(lines(DOCUMENTS[i * 30 : i * 30 + 30]))
    return profile(files(tmp_path / "*.jsonl"), validation_fraction=0)


def test_shards_done_by_several_processes_are_those_done_by_one(store, tmp_path):
    wanted = many(tmp_path)
    words = TokenizerStep().run(Context(wanted, store))
    shown = []
    made = DatasetStep(words).run(Context(wanted, store, progress=lambda text, done: shown.append(done)))
    plan = DatasetStep(words).plan(Context(wanted, store))
    other = Store(str(tmp_path / "other"))
    with other.artifacts.publish(words.kind, words.key, words.summary) as folder:
        for path in store.artifacts.path(words).iterdir():
            if path.name != "manifest.json":
                (folder / path.name).write_bytes(path.read_bytes())
    alone = [tokenize_shard.tokenize(plan, other, k) for k in range(5)]
    for one in alone:
        for path in Path(one.location).glob("train.*"):
            assert (
                path.read_bytes()
                == (store.artifacts.path(made).parent.parent / "tokens" / one.key / path.name).read_bytes()
            )
    assert shown == sorted(shown)
    assert shown[-1] == 1


def test_which_engine_was_used_and_why_is_said_once_whoever_tokenizes(store, tmp_path, caplog):
    wanted = many(tmp_path)
    (tmp_path / "source").mkdir()
    changing = metaspace()
    changing.normalizer = normalizers.NFKC()
    trained(changing, ["<unk>", EOS]).save(str(tmp_path / "source/tokenizer.json"))
    (tmp_path / "source/tokenizer_config.json").write_text(json.dumps({"eos_token": EOS}))
    own = {"source": str(tmp_path / "source"), "vocabulary_size": None}
    wanted = wanted.model_copy(update={"tokenizer": wanted.tokenizer.model_copy(update=own)})
    with caplog.at_level(logging.INFO):
        made = make(wanted, store)
    assert made.summary["shards"] == 5
    assert caplog.text.count("not tokenizing with gigatoken: ") == 1
    assert caplog.text.count("not tokenizing with tokenizers by words: ") == 1
    (row,) = json.loads((store.artifacts.path(made) / "report.json").read_text())
    assert row["engines"] == ["tokenizers"]


def test_a_plan_can_be_written_down_and_worked_from_elsewhere(store, tmp_path, capsys):
    wanted = many(tmp_path)
    plan = DatasetStep(TokenizerStep().run(Context(wanted, store))).plan(Context(wanted, store))
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan.to_json()))
    assert DatasetPlan.from_json(json.loads(path.read_text())) == plan
    assert tokenize_shard.main(["--plan", str(path), "--store", store.uri, "--shard", "3"]) == 0
    assert json.loads(capsys.readouterr().out)["key"] == plan.key(3)
    assert store.artifacts.find("tokens", plan.key(3))


def test_a_worker_that_dies_takes_only_its_shard_with_it(store, tmp_path):
    wanted = many(tmp_path)
    plan = DatasetStep(TokenizerStep().run(Context(wanted, store))).plan(Context(wanted, store))
    with WorkerPool(plan, store, 1) as workers:
        workers.run("tokenize", 0)
        (worker,) = workers._workers
        worker._process.kill()
        with pytest.raises(WorkerFailed, match="shard 1 ended with exit code -9"):
            workers.run("tokenize", 1)
        assert workers.run("tokenize", 1).key == plan.key(1)


def test_what_a_worker_refuses_is_refused_here(store, tmp_path):
    wanted = many(tmp_path)
    words = TokenizerStep().run(Context(wanted, store))
    (tmp_path / "2.jsonl").write_bytes(b'{"text": ')
    with pytest.raises(SourceError, match=re.escape("2.jsonl, line 1: invalid JSON")):
        DatasetStep(words).run(Context(wanted, store))
    (tmp_path / "2.jsonl").write_bytes(b'{"other": "a"}\n')
    with pytest.raises(ProfileError, match=r"data\.text = text: .*2\.jsonl has no such column"):
        DatasetStep(words).run(Context(wanted, store))
