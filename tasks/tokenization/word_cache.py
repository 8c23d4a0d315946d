"""Word cache: ids of the words of SentencePiece-style tokenizers, so that each is encoded only once.

Such tokenizers (Llama 2) replace spaces with a marker that begins a word; if they do not split there, the vocabulary must show
that no merge crosses the start of a marker. A word's ids depend on the word alone and most words repeat, which makes this about
twice as fast as `tokenizers` on one core. The cache has two generations: when the newer is full it replaces the older, and words
that repeat move from the older to the newer. Words that only one text repeats are soon evicted.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from typing import Any

import regex
from tokenizers import Tokenizer

MAX_WORD_LENGTH = 64  # characters of a cached word
GENERATION_SIZE = 200_000  # words; two generations take 64 MB for words of nine letters
MAX_DISTINCT = 0.5  # largest share of distinct words in a sample at which the cache pays off


class WordCache(dict[str, bytes]):
    """Word -> its ids as C unsigned ints; missing words are tokenized on access.

    Args:
        state: JSON of the tokenizer, without special tokens.

    Raises:
        ValueError: it does not write spaces as markers, its tokens may span spaces, or it uses BPE dropout.
    """

    def __init__(self, state: dict[str, Any]) -> None:
        super().__init__()
        self._older: dict[str, bytes] = {}
        pre_tokenizer, marker = state["pre_tokenizer"], _space_marker(state)
        if marker is None:
            raise ValueError("it does not write spaces as the beginnings of words")
        if state["model"].get("dropout"):
            raise ValueError("it uses BPE dropout")
        if state["normalizer"] and any(token["normalized"] for token in state["added_tokens"]):
            raise ValueError("it searches for added tokens in normalized text")
        self._marker = marker
        self._prefix = "" if pre_tokenizer and pre_tokenizer["prepend_scheme"] == "never" else " "
        self._always_prefix = pre_tokenizer is None  # otherwise not before a text that begins with a space
        splits = pre_tokenizer is not None and pre_tokenizer["split"]
        if not splits:
            _require_independent_words(state["model"], marker)
        self._find = regex.compile(" [^ ]*|[^ ]+" if splits else " *[^ ]+| +").findall
        self._drop_space = splits and bool(self._prefix)  # every word has exactly one space
        without = dict.fromkeys(("normalizer", "post_processor", "pre_tokenizer"))
        self._tokenizer = Tokenizer.from_str(json.dumps({**state, **without, "added_tokens": []}))
        added = [token["content"] for token in state["added_tokens"]]
        self._added_tokens = regex.compile("|".join(map(regex.escape, added))) if added else None

    def __missing__(self, word: str) -> bytes:
        ids = self._older.get(word)
        if ids is None:
            text = self._marker + word if self._drop_space else word.replace(" ", self._marker)
            ids = array("I", self._tokenizer.encode(text, add_special_tokens=False).ids).tobytes()
        if len(word) <= MAX_WORD_LENGTH:
            if len(self) >= GENERATION_SIZE:
                self._older = dict(self)
                self.clear()
            self[word] = ids
        return ids

    def encode(self, text: str) -> bytes | None:
        """The text's ids as C unsigned ints; None if `tokenizers` must encode it, for its added tokens."""
        if self._added_tokens and self._added_tokens.search(text):
            return None
        return b"".join(map(self.__getitem__, self._split(text)))

    def is_effective(self, texts: Sequence[str]) -> bool:
        """Whether enough words of these texts repeat."""
        words = [word for text in texts for word in self._split(text)]
        return len(set(words)) <= MAX_DISTINCT * len(words)

    def _split(self, text: str) -> list[str]:
        """The words, each with the spaces that begin it unless `_drop_space`."""
        if self._marker in text:
            text = text.replace(self._marker, " ")
        if text and (self._always_prefix or not text.startswith(" ")):
            text = self._prefix + text
        return text.split(" ")[1:] if self._drop_space else self._find(text)


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
    """Raise ValueError if the ids of an unsplit text may differ from those of its words."""
    plain = model["type"] == "BPE" and marker in model["vocab"] and not model.get("ignore_merges")
    affixes = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
    if not plain or affixes or any(marker in token.lstrip(marker) for token in model["vocab"]):
        raise ValueError("its tokens may span spaces")
