"""Tokenization engines: the ids of `tokenizers` from every engine, and the choice between them."""

import json
import logging
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers

from tasks.tokenization import engines, word_cache
from tests.tasks.tokenization.tokenizers import (
    DOCUMENTS,
    add_tokens,
    deepseek,
    gpt2,
    llama2,
    llama3,
    metaspace,
    qwen3,
    spanning_spaces,
    trained,
    unsplit,
)

WORD_CACHE = "tokenizers with word cache"


def text_tokenizer(kind):
    tokenizer = trained(kind)
    tokenizer.encode_special_tokens = True
    return tokenizer


def assert_equal_ids(engine, tokenizer, texts):
    for actual, expected in zip(
        engine.encode(texts), engines.HuggingFaceEngine(tokenizer).encode(texts), strict=True
    ):
        assert np.array_equal(actual, expected)


@pytest.mark.parametrize(
    ("kind", "engine"),
    [
        *((kind, "gigatoken") for kind in (gpt2, llama3, qwen3)),
        *((kind, WORD_CACHE) for kind in (metaspace, unsplit)),
        (deepseek, "tokenizers"),
        (llama2, "tokenizers"),  # normalizes the text before it searches for a token
    ],
)
def test_added_tokens_keep_their_ids_among_special_tokens(kind, engine):
    tokenizer = text_tokenizer(kind)
    plain = add_tokens(tokenizer)
    ids = {token["content"]: token["id"] for token in json.loads(tokenizer.to_str())["added_tokens"]}
    texts = [f"a{token.content}b {token.content} c<|7|>{other.content}" for token in plain for other in plain]
    chosen = engines.choose_engine(tokenizer, DOCUMENTS[:60])
    assert chosen.name == engine
    for engine in (chosen, engines.HuggingFaceEngine(tokenizer)):
        assert [engine.encode([token.content])[0].tolist() for token in plain] == [
            [ids[token.content]] for token in plain
        ]
    assert_equal_ids(chosen, tokenizer, [*texts, *DOCUMENTS])


@pytest.fixture(scope="module", params=[metaspace, llama2, unsplit])
def small_cache(request):
    """A word-cache engine that evicts after five words, and its tokenizer."""
    tokenizer = text_tokenizer(request.param)
    # Not special: recognized in text.
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("<pad>", "   ")])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(word_cache, "GENERATION_SIZE", 5)
        yield engines.WordCacheEngine(tokenizer, 1), tokenizer


@settings(max_examples=200)
@given(
    texts=st.lists(st.one_of(st.text(), st.text("a1 \t\n\r'sSſlL.<pad>▁é日\x1c\x85\u2028٣Ⅷ²")), max_size=4)
)
def test_word_cache_gives_the_ids_of_the_whole_text(small_cache, texts):
    assert_equal_ids(*small_cache, texts)


@pytest.mark.parametrize("kind", [metaspace, llama2, unsplit])
def test_word_cache_is_chosen_without_gigatoken(kind, monkeypatch):
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    tokenizer = text_tokenizer(kind)
    engine = engines.choose_engine(tokenizer, DOCUMENTS[:60])
    assert engine.name == WORD_CACHE
    assert_equal_ids(engine, tokenizer, DOCUMENTS)


def test_tokenizers_is_chosen_where_the_word_cache_cannot_be_used(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    normalizing = trained(spanning_spaces)
    normalizing.normalizer = normalizers.NFKC()
    with caplog.at_level(logging.INFO):
        for tokenizer, threads in ((trained(gpt2), 16), (trained(spanning_spaces), 1), (normalizing, 1)):
            assert engines.choose_engine(tokenizer, DOCUMENTS[:5], threads).name == "tokenizers"
    assert "tokenizers is faster on 16 threads" in caplog.text
    assert "its tokens may span spaces" in caplog.text
    assert "it does not write spaces as the beginnings of words" in caplog.text


@pytest.mark.parametrize("wrong", ["an added token", "ids that the texts lack"])
def test_engine_with_other_ids_is_not_chosen_and_logged(wrong, caplog, monkeypatch):
    tokenizer = text_tokenizer(llama3)
    changed = [tokenizer.token_to_id(add_tokens(tokenizer)[-1].content)]
    if wrong != "an added token":
        found, _ = engines.HuggingFaceEngine(tokenizer).encode([*DOCUMENTS, *engines.EDGE_CASES])
        changed = [*set(range(600)) - set(found)]
    correct = engines.GigatokenEngine._encode

    def encode(self, texts):
        ids, counts = correct(self, texts)
        return np.where(np.isin(ids, changed), ids + 1, ids), counts

    monkeypatch.setattr(engines.GigatokenEngine, "_encode", encode)
    with caplog.at_level(logging.INFO):
        assert engines.choose_engine(tokenizer, DOCUMENTS[:60]).name == "tokenizers"
    assert "not tokenizing with gigatoken: " in caplog.text
    assert "encode the same text differently" in caplog.text
