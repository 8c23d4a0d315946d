"""Tokenized shards: document order, added tokens, dropped documents, and engines that fail a check."""

import json
import logging
import tracemalloc

import pytest

from profiles import resolve
from profiles.errors import ProfileError
from tasks.sources import duplicates
from tasks.sources.formats import long_text
from tasks.sources.shard import SourceError
from tasks.step import Context
from tasks.steps.dataset import DatasetStep
from tasks.steps.tokenizer import TokenizerStep
from tasks.store.store import Store
from tasks.tokenization import dataset_plan, engines, tokenize_shard, tokenizer_files
from tasks.tokenization.tokenizer_files import EOS
from tests.tasks.source_files import documents_of, files, lines, profile, write_pair
from tests.tasks.tokenization.tokenizers import DOCUMENTS, PROSE, add_tokens, gpt2, trained


def make(wanted, store, **more):
    context = Context(wanted, store, **more)
    return DatasetStep(TokenizerStep().run(context)).run(context)


def test_long_documents_keep_their_order_among_short_ones(store, tmp_path, monkeypatch):
    texts = [*DOCUMENTS[:20], PROSE, *DOCUMENTS[20:40], PROSE[9:]]
    (tmp_path / "a.jsonl").write_bytes(lines(texts))
    wanted = profile(files(tmp_path / "a.jsonl"), validation_fraction=0)
    expected = documents_of(make(wanted, store), store)
    monkeypatch.setattr(tokenize_shard, "BATCH_CHARACTERS", 5000)
    monkeypatch.setattr(long_text, "SEGMENT", 2000)
    other = Store(str(tmp_path / "other"))
    assert documents_of(make(wanted, other), other) == expected


def test_document_too_long_for_the_index_is_rejected(store, tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_bytes(lines([*DOCUMENTS[:20], PROSE]))
    monkeypatch.setattr(tokenize_shard, "BATCH_CHARACTERS", 5000)
    monkeypatch.setattr(tokenize_shard, "MAX_LENGTH", 100)
    with pytest.raises(SourceError, match=r"a\.jsonl: a document has more than 100 tokens; split it"):
        make(profile(files(tmp_path / "a.jsonl"), validation_fraction=0), store)


def test_shard_is_tokenized_again_when_an_engine_fails_a_later_check(store, tmp_path, monkeypatch, caplog):
    pytest.importorskip("gigatoken", reason="gigatoken is not installed")
    (tmp_path / "a.jsonl").write_bytes(lines(DOCUMENTS))
    wanted = profile(files(tmp_path / "a.jsonl"), validation_fraction=0)
    expected = documents_of(make(wanted, store), store)
    monkeypatch.setattr(tokenize_shard, "BATCH_CHARACTERS", 5000)
    correct = engines.GigatokenEngine._encode

    def wrong_after_the_first_batch(self, texts):
        ids, counts = correct(self, texts)
        return (ids, counts) if DOCUMENTS[0] in texts else (ids[::-1], counts)

    monkeypatch.setattr(engines.GigatokenEngine, "_encode", wrong_after_the_first_batch)
    other = Store(str(tmp_path / "other"))
    with caplog.at_level(logging.INFO):
        assert documents_of(make(wanted, other), other) == expected
    assert "tokenizing it again with tokenizers" in caplog.text


def test_special_tokens_in_text_are_encoded_as_text(store, tmp_path):
    texts = [f"before {EOS} after{EOS}", *DOCUMENTS]
    (tmp_path / "a.jsonl").write_bytes(lines(texts))
    wanted = profile(files(tmp_path / "a.jsonl"), validation_fraction=0)
    tokenizer = TokenizerStep().run(Context(wanted, store))
    documents = documents_of(DatasetStep(tokenizer).run(Context(wanted, store)), store)
    eos = tokenizer.summary["eos"]
    assert all(document.count(eos) == 1 and document[-1] == eos for document in documents)
    assert (
        tokenizer_files.load(store.artifacts.path(tokenizer)).decode(
            documents[0][:-1], skip_special_tokens=False
        )
        == texts[0]
    )


def test_key_of_shards_has_the_engines_version_if_added_tokens_are_not_special(store, tmp_path, monkeypatch):
    """An earlier version confused such tokens."""
    tokenizer = trained(gpt2)
    (think, *_) = add_tokens(tokenizer)
    (tmp_path / "tokenizer").mkdir()
    tokenizer.save(str(tmp_path / "tokenizer/tokenizer.json"))
    (tmp_path / "a.jsonl").write_bytes(lines([f"a{think.content}b", *DOCUMENTS]))
    sources = f"data.sources={json.dumps([files(tmp_path / 'a.jsonl')])}"
    overrides = [f"tokenizer.source={tmp_path / 'tokenizer'}", sources, "tokenizer.vocabulary_size=null"]
    wanted = resolve.load("tiny", [*overrides, "data.validation_fraction=0"])
    with monkeypatch.context() as patch:
        patch.setattr(dataset_plan, "has_plain_added_tokens", lambda folder: False)
        earlier = make(wanted, store)
    now = make(wanted, store)
    assert now.key != earlier.key
    assert documents_of(now, store)[0][1] == tokenizer.token_to_id(think.content)


def test_bos_and_eos_are_added_as_configured(store, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines(DOCUMENTS))
    source = files(tmp_path / "a.jsonl")
    tokenizer = TokenizerStep().run(Context(profile(source), store))
    bos, eos = tokenizer.summary["bos"], tokenizer.summary["eos"]

    def documents(**options):
        return documents_of(DatasetStep(tokenizer).run(Context(profile(source, **options), store)), store)

    plain = documents(append_eos=False)
    assert documents(prepend_bos=True) == [[bos, *document, eos] for document in plain]
    assert documents(prepend_bos=True, append_eos=False) == [[bos, *document] for document in plain]


def test_duplicate_short_and_missing_documents_are_dropped_and_counted(store, tmp_path):
    first, second = DOCUMENTS[:60], [*DOCUMENTS[50:120], DOCUMENTS[119], "short", "short"]
    (tmp_path / "a.jsonl").write_bytes(lines(first))
    (tmp_path / "b.jsonl").write_bytes(lines([*second, "half a surrogate pair: \ud800"]) + b'{"n": 1}\n')
    source = files(tmp_path / "*.jsonl")
    options = {"deduplicate": True, "minimum_length": 6, "validation_fraction": 0}
    tokenizer = TokenizerStep().run(Context(profile(source, **options), store))
    artifact = DatasetStep(tokenizer).run(Context(profile(source, **options), store))
    summary = artifact.summary
    assert (summary["documents"], summary["duplicates"], summary["short"]) == (120, 12, 1)
    assert summary["missing"] == 2
    report = json.loads((store.artifacts.path(artifact) / "report.json").read_text())
    assert report[0]["duplicates"] == 12
    assert report[0]["bytes_per_token"] > 1
    combined = [*first, *DOCUMENTS[60:120]]
    (tmp_path / "c.jsonl").write_bytes(lines(combined))
    other = profile(files(tmp_path / "c.jsonl"), validation_fraction=0)
    assert documents_of(artifact, store) == documents_of(
        DatasetStep(tokenizer).run(Context(other, store)), store
    )


def test_dropped_documents_do_not_depend_on_megatron_pairs_beside_them(store, tmp_path):
    write_pair(tmp_path / "pair", [list(range(30))])
    (tmp_path / "a.jsonl").write_bytes(lines([*DOCUMENTS[:10], *DOCUMENTS[:3]]))
    (tmp_path / "b.jsonl").write_bytes(lines([DOCUMENTS[20], DOCUMENTS[5]]))
    pair, texts = {"kind": "megatron", "path": str(tmp_path / "pair")}, files(tmp_path / "*.jsonl")
    tokenizer = TokenizerStep().run(Context(profile(texts), store))

    def dropped(*sources):
        plan = DatasetStep(tokenizer).plan(Context(profile(*sources), store))
        hashes = {k: duplicates.fingerprint(plan, store, k) for k in duplicates.comparable(plan)}
        plan = duplicates.find(plan, store, hashes)
        return [duplicates.dropped_documents(plan, store, k).tolist() for k in range(len(plan.shards))]

    assert dropped(pair, texts) == [[], [10, 11, 12], [1]]
    assert dropped(texts) == [[10, 11, 12], [1]]  # of the same artifact


def test_memory_does_not_grow_by_an_object_per_hashed_or_dropped_document(store, tmp_path):
    count = 50_000
    (tmp_path / "a.jsonl").write_bytes(lines(["repeated"] * count))
    wanted = profile(files(tmp_path / "a.jsonl"))
    plan = DatasetStep(TokenizerStep().run(Context(wanted, store))).plan(Context(wanted, store))
    tracemalloc.start()
    try:
        hashes = duplicates.fingerprint(plan, store, 0)
        assert tracemalloc.get_traced_memory()[1] < 40 * count
        plan = duplicates.find(plan, store, {0: hashes})
        tracemalloc.reset_peak()
        assert len(duplicates.dropped_documents(plan, store, 0)) == count - 1
        assert tracemalloc.get_traced_memory()[1] < 40 * count
    finally:
        tracemalloc.stop()


def test_new_duplicates_only_retokenize_shards_that_lose_a_document(store, tmp_path):
    for name, part in ("a", DOCUMENTS[:50]), ("c", DOCUMENTS[50:100]), ("d", DOCUMENTS[100:150]):
        (tmp_path / f"{name}.jsonl").write_bytes(lines(part))
    wanted = profile(files(tmp_path / "*.jsonl"), deduplicate=True, validation_fraction=0)
    tokenizer = TokenizerStep().run(Context(wanted, store))
    DatasetStep(tokenizer).run(Context(wanted, store))
    before = {path.name for path in (tmp_path / "store/artifacts/tokens").iterdir()}
    (tmp_path / "b.jsonl").write_bytes(lines([DOCUMENTS[120], "something else entirely"]))
    artifact = DatasetStep(tokenizer).run(Context(wanted, store))
    after = {path.name for path in (tmp_path / "store/artifacts/tokens").iterdir()}
    assert len(after - before) == 2  # b, and d without the document that b now has first
    assert artifact.summary["documents"] == 151


def test_too_many_records_without_text_are_rejected(store, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines([*DOCUMENTS, *[None] * 60]))
    source = files(tmp_path / "a.jsonl")
    tokenizer = TokenizerStep().run(Context(profile(source), store))
    with pytest.raises(ProfileError, match=r"maximum_missing = 0\.1: 60 of 260 records in .* have no text"):
        DatasetStep(tokenizer).run(Context(profile(source), store))
    assert (
        DatasetStep(tokenizer).run(Context(profile(source, maximum_missing=0.3), store)).summary["missing"]
        == 60
    )
