"""TextSplitter: segments of a long text have the whole text's tokens, for every kind of tokenizer."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.sources.formats import long_text
from tasks.sources.formats.long_text import TextSplitter
from tests.tasks.tokenization.tokenizers import (
    PROSE,
    deepseek,
    gpt2,
    llama2,
    llama3,
    metaspace,
    spanning_spaces,
    trained,
)

RANDOM = random.Random(0)
CSV = "".join(f"{RANDOM.random():.6},{RANDOM.randrange(10**9)},2024-01-{i % 28:02}\n" for i in range(2000))
JSON = json.dumps([{"a": i / 7, "b": [i, {"c-d": "1"}]} for i in range(900)], indent=4)
CODE = "".join(f"\tif (x[{i}] != 0x{i:04x}) {{\n\t\ty += {i};  // {i}!\n\t}}\n" for i in range(900))


def split(tokenizer, text):
    return list(TextSplitter(tokenizer).split(long_text.of_text(text)))


def encode(tokenizer, *texts):
    return [token for text in texts for token in tokenizer.encode(text, add_special_tokens=False).ids]


@pytest.mark.parametrize("text", [PROSE, CSV, JSON, CODE], ids=["prose", "csv", "json", "code"])
@pytest.mark.parametrize("kind", [gpt2, llama3, deepseek, metaspace, llama2])
def test_segments_have_the_tokens_of_the_whole_text(kind, text, monkeypatch):
    monkeypatch.setattr(long_text, "SEGMENT", 2000)
    tokenizer = trained(kind)
    segments = split(tokenizer, text)
    one_word = text is CSV and kind in (metaspace, llama2)  # a text without spaces
    assert max(map(len, segments)) < (len(text) + 1 if one_word else 2600)
    assert encode(tokenizer, *segments) == encode(tokenizer, text)


@pytest.mark.parametrize("kind", [gpt2, llama3, deepseek])
@settings(max_examples=60)
@given(
    runs=st.lists(
        st.tuples(st.sampled_from(["1", "-", " ", "\n", "'s", "a", "B", "é", "日", ",\n", "\r\n", "12 "]),
                  st.sampled_from([1, 2, 3, 40, 97])),
        min_size=10, max_size=40,
    )
)  # fmt: skip
def test_segments_of_long_runs_have_the_tokens_of_the_whole_text(kind, runs):
    text = "".join(part * count for part, count in runs)
    tokenizer = trained(kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_text, "SEGMENT", 150)
        patch.setattr(long_text, "WINDOW", 64)  # shorter than some of the runs
        segments = split(tokenizer, text)
    assert encode(tokenizer, *segments) == encode(tokenizer, text)


def test_text_without_a_valid_boundary_is_not_split(monkeypatch):
    monkeypatch.setattr(long_text, "SEGMENT", 1000)
    text = "a" * 9000
    assert split(trained(gpt2), text) == [text]


def test_text_is_never_split_if_tokens_span_spaces(monkeypatch):
    monkeypatch.setattr(long_text, "SEGMENT", 1000)
    assert split(trained(spanning_spaces), PROSE) == [PROSE]
