"""Word caches: ids of the words of a tokenizer's pre-tokenizer, so that each is encoded only once.

A word's ids depend on the word alone and most words repeat, which makes this two to three times as fast as `tokenizers` on one
core. The cache has two generations: when the newer is full it replaces the older, and words that repeat move from the older to
the newer. Words that only one text repeats are soon evicted.

    regex   byte-level tokenizers (GPT-2, Llama 3, DeepSeek) split by regular expressions before they merge
    space   tokenizers in the style of SentencePiece (Llama 2) replace spaces with a marker that begins a word; if they do
            not split there, the vocabulary must show that no merge crosses the start of a marker

`tokenizers` uses the Oniguruma regex engine, this module Python's `regex`, and their Unicode versions may differ. Before the
first text that contains a character, both engines split that character between letters, digits, spaces and punctuation; texts
with a character on which they differ are left to `tokenizers`.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import regex
from tokenizers import Tokenizer

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
MAX_WORD_LENGTH = 64  # characters of a cached word
GENERATION_SIZE = 200_000  # words; two generations take 64 MB for words of nine letters
MAX_DISTINCT = 0.5  # largest share of distinct words in a sample at which the cache pays off
PROBE = "a{0}a 1{0}1 {0} .{0}. '{0}'s{0}{0}\n{0}\n\n{0}\t"

Splitter = Callable[[str], list[str]]


class UnsupportedTokenizer(ValueError):
    """The engine does not support this tokenizer, or would be slower with it."""


class WordCache(dict[str, bytes], ABC):
    """Word -> its ids as C unsigned ints; missing words are tokenized on access.

    Args:
        state: JSON of the tokenizer, without special tokens.
        word_pre_tokenizers: its pre-tokenizers that run on single words.
    """

    def __init__(self, state: dict[str, Any], word_pre_tokenizers: Sequence[dict[str, Any]] = ()) -> None:
        super().__init__()
        self._older: dict[str, bytes] = {}
        self._tokenizer = _with_pre_tokenizers(state, word_pre_tokenizers)
        added = [token["content"] for token in state["added_tokens"]]
        self._added_tokens = regex.compile("|".join(map(regex.escape, added))) if added else None

    def __missing__(self, word: str) -> bytes:
        ids = self._older.get(word)
        if ids is None:
            text = self.model_text(word)
            ids = array("I", self._tokenizer.encode(text, add_special_tokens=False).ids).tobytes()
        if len(word) <= MAX_WORD_LENGTH:
            if len(self) >= GENERATION_SIZE:
                self._older = dict(self)
                self.clear()
            self[word] = ids
        return ids

    def encode(self, text: str) -> bytes | None:
        """The text's ids as C unsigned ints; None if `tokenizers` must encode it."""
        if self._added_tokens and self._added_tokens.search(text):
            return None
        return b"".join(map(self.__getitem__, self.split(text)))

    def is_effective(self, texts: Sequence[str]) -> bool:
        """Whether enough words of these texts repeat."""
        words = [word for text in texts for word in self.split(text)]
        return len(set(words)) <= MAX_DISTINCT * len(words)

    @abstractmethod
    def split(self, text: str) -> Iterable[str]:
        """Split a text into words."""

    def model_text(self, word: str) -> str:
        """The word as the tokenizer's model sees it."""
        return word


def create_word_cache(state: dict[str, Any]) -> WordCache:
    """A cache for a tokenizer, from its JSON without special tokens.

    Raises:
        UnsupportedTokenizer: it splits neither by regular expressions nor at spaces, normalizes text, or uses BPE dropout.
    """
    if state["model"].get("dropout"):
        raise UnsupportedTokenizer("it uses BPE dropout")
    marker = _space_marker(state)
    return RegexWordCache(state) if marker is None else SpaceWordCache(state, marker)


class SpaceWordCache(WordCache):
    """Words that begin with a space, which the model sees as a marker."""

    def __init__(self, state: dict[str, Any], marker: str) -> None:
        super().__init__(state)
        pre_tokenizer = state["pre_tokenizer"]
        if state["normalizer"] and any(token["normalized"] for token in state["added_tokens"]):
            raise UnsupportedTokenizer("it searches for added tokens in normalized text")
        self._marker = marker
        self._prefix = "" if pre_tokenizer and pre_tokenizer["prepend_scheme"] == "never" else " "
        self._always_prefix = pre_tokenizer is None  # otherwise not before a text that begins with a space
        splits = pre_tokenizer is not None and pre_tokenizer["split"]
        if not splits:
            _require_independent_words(state["model"], marker)
        self._find = regex.compile(" [^ ]*|[^ ]+" if splits else " *[^ ]+| +").findall
        self._drop_space = splits and bool(self._prefix)  # every word has exactly one space

    def split(self, text: str) -> list[str]:
        if self._marker in text:
            text = text.replace(self._marker, " ")
        if text and (self._always_prefix or not text.startswith(" ")):
            text = self._prefix + text
        return text.split(" ")[1:] if self._drop_space else self._find(text)

    def model_text(self, word: str) -> str:
        return self._marker + word if self._drop_space else word.replace(" ", self._marker)


class RegexWordCache(WordCache):
    """Words that one or several regular expressions split, one after another."""

    def __init__(self, state: dict[str, Any]) -> None:
        splits, word_pre_tokenizers = _split_pre_tokenizers(state)
        super().__init__(state, word_pre_tokenizers)
        self._splitters = [_splitter(split["pattern"]["Regex"]) for split in splits]
        self._reference = _with_pre_tokenizers(state, splits).pre_tokenizer
        self._equal: set[str] = set()  # characters on which both regex engines agree
        self._different: set[str] = set()
        self._compare(map(chr, range(128)))
        self._ascii_equal = not self._different

    def encode(self, text: str) -> bytes | None:
        if not (self._ascii_equal and text.isascii()):
            characters = set(text)
            self._compare(characters - self._equal - self._different)
            if not self._different.isdisjoint(characters):
                return None
        return super().encode(text)

    def split(self, text: str) -> Iterable[str]:
        first, *others = self._splitters
        words: Iterable[str] = first(text)
        for split in others:
            words = chain.from_iterable(map(split, words))
        return words

    def _compare(self, characters: Iterable[str]) -> None:
        for character in characters:
            probe = PROBE.format(character)
            expected = [probe[begin:end] for _, (begin, end) in self._reference.pre_tokenize_str(probe)]
            (self._equal if list(self.split(probe)) == expected else self._different).add(character)


def _space_marker(state: dict[str, Any]) -> str | None:
    """What a SentencePiece-style tokenizer writes for a space; None for other tokenizers."""
    normalizer, pre_tokenizer = state["normalizer"], state["pre_tokenizer"]
    marker: str | None
    if pre_tokenizer and pre_tokenizer["type"] == "Metaspace" and normalizer is None:
        marker = pre_tokenizer["replacement"]
        return marker
    if pre_tokenizer is None and normalizer and len(steps := normalizer.get("normalizers", [])) == 2:
        marker = steps[0].get("prepend")
        replace = {"type": "Replace", "pattern": {"String": " "}, "content": marker}
        if steps == [{"type": "Prepend", "prepend": marker}, replace]:
            return marker
    return None


def _require_independent_words(model: dict[str, Any], marker: str) -> None:
    """Raise UnsupportedTokenizer if the ids of an unsplit text may differ from those of its words."""
    plain = model["type"] == "BPE" and marker in model["vocab"] and not model.get("ignore_merges")
    affixes = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
    if not plain or affixes or any(marker in token.lstrip(marker) for token in model["vocab"]):
        raise UnsupportedTokenizer("its tokens may span spaces")


def _split_pre_tokenizers(state: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Pre-tokenizers that split by regex, and later ones, which see one word. Raises UnsupportedTokenizer."""
    normalizer = state["normalizer"]
    if normalizer and normalizer.get("normalizers") != []:
        raise UnsupportedTokenizer("it normalizes the text")
    steps = state["pre_tokenizer"] or {}
    steps = list(steps.get("pretokenizers", [steps] if steps else []))
    if steps and steps[0]["type"] == "ByteLevel" and steps[0].get("use_regex", True):
        steps[:1] = [_split_step(GPT2), {**steps[0], "use_regex": False}]
    count = next((i for i, step in enumerate(steps) if not _is_split_step(step)), len(steps))
    if count == 0:
        raise UnsupportedTokenizer("it does not begin by splitting with a regular expression")
    on_words = steps[count:]
    if any(step["type"] not in ("ByteLevel", "Digits") or step.get("add_prefix_space") for step in on_words):
        raise UnsupportedTokenizer("a word's tokens may depend on its position")
    if any(step.get("use_regex", step["type"] == "ByteLevel") for step in on_words):
        raise UnsupportedTokenizer("it splits words again")
    return steps[:count], on_words


def _split_step(pattern: str | None) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _is_split_step(step: dict[str, Any]) -> bool:
    return step["type"] == "Split" and step == _split_step(step["pattern"].get("Regex"))


def _splitter(pattern: str) -> Splitter:
    """Split function: a pattern's matches and the text between them. Raises UnsupportedTokenizer."""
    try:
        splitter = regex.compile(f"(?:{pattern})|(?:(?!{pattern})[\\s\\S])+")
        if regex.compile(pattern).match("") or splitter.groups:
            raise UnsupportedTokenizer(f"{pattern} has groups or matches the empty string")
    except regex.error as error:
        raise UnsupportedTokenizer(f"{pattern}: {error}") from error
    find_all: Splitter = splitter.findall
    return find_all


def _with_pre_tokenizers(state: dict[str, Any], pre_tokenizers: Sequence[dict[str, Any]]) -> Tokenizer:
    """The tokenizer with these pre-tokenizers, without normalizer and added tokens."""
    sequence = {"type": "Sequence", "pretokenizers": list(pre_tokenizers)}
    changed: dict[str, Any] = {
        "normalizer": None,
        "added_tokens": [],
        "post_processor": None,
        "pre_tokenizer": sequence,
    }
    return Tokenizer.from_str(json.dumps({**state, **changed}))
