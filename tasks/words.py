"""Texts as the words that a tokenizer's own regular expression cuts them into, each of which is tokenized once.

A byte-level tokenizer (GPT-2, Llama 3, DeepSeek) cuts a text into words before it merges, and what it makes of a word depends
on that word alone. Most words of a text have been seen before, so that a dictionary answers for them, and `tokenizers` is asked
for new ones only: two to three times the speed on one core.

Two engines of regular expressions, Oniguruma in `tokenizers` and Python's `regex`, may know other editions of Unicode. So each
character is tried between letters, digits, spaces and marks before the first text with it, and texts with one that
the two take for different things are left to `tokenizers`.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import regex
from tokenizers import Tokenizer

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LONGEST = 64  # characters of a word that is remembered
MOST = 400_000  # words that are: 64 MB for words of nine letters
RECUR = 0.5  # share of the words of a sample that may be new
PROBE = "a{0}a 1{0}1 {0} .{0}. '{0}'s{0}{0}\n{0}\n\n{0}\t"

Cut = Callable[[str], list[str]]


class Unsuited(ValueError):
    """The tokenizer does not go by words, or by others than are known here."""


class Words(dict[str, bytes]):
    """Word -> its ids as C unsigned ints; a word that is not there is tokenized.

    Args:
        tokenizer: without special tokens.

    Raises:
        Unsuited: no regular expression to cut by, a prefix, a normalizer, or chance.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        described = json.loads(tokenizer.to_str())
        stages, rest = _stages(described)
        self._cuts = [_cutter(stage["pattern"]["Regex"]) for stage in stages]
        self._theirs = _only(described, {"type": "Sequence", "pretokenizers": stages}).pre_tokenizer
        self._word = _only(described, {"type": "Sequence", "pretokenizers": rest})
        added = [token["content"] for token in described["added_tokens"]]
        self._added = regex.compile("|".join(map(regex.escape, added))) if added else None
        self._alike: set[str] = set()
        self._unlike: set[str] = set()
        self._try(map(chr, range(128)))
        self._ascii = not self._unlike

    def __missing__(self, word: str) -> bytes:
        ids = array("I", self._word.encode(word, add_special_tokens=False).ids).tobytes()
        if len(word) <= LONGEST and len(self) < MOST:
            self[word] = ids
        return ids

    def ids(self, text: str) -> bytes | None:
        """The text's ids as C unsigned ints; None for a text that `tokenizers` must take whole."""
        if not (self._ascii and text.isascii()):
            characters = set(text)
            self._try(characters - self._alike - self._unlike)
            if not self._unlike.isdisjoint(characters):
                return None
        if self._added and self._added.search(text):
            return None
        return b"".join(map(self.__getitem__, self._cut(text)))

    def recur(self, texts: Sequence[str]) -> bool:
        """Whether words come again often enough in these texts to be worth a dictionary."""
        words = [word for text in texts for word in self._cut(text)]
        return len(set(words)) <= RECUR * len(words)

    def _cut(self, text: str) -> Iterable[str]:
        first, *more = self._cuts
        words: Iterable[str] = first(text)
        for cut in more:
            words = chain.from_iterable(map(cut, words))
        return words

    def _try(self, characters: Iterable[str]) -> None:
        for character in characters:
            probe = PROBE.format(character)
            theirs = [probe[begin:end] for _, (begin, end) in self._theirs.pre_tokenize_str(probe)]
            (self._alike if list(self._cut(probe)) == theirs else self._unlike).add(character)


def _stages(described: dict[str, Any]) -> tuple[list[dict], list[dict]]:
    """What cuts by regular expressions, and the parts after it, which see words.

    Raises:
        Unsuited
    """
    normalizer = described["normalizer"]
    if normalizer and normalizer.get("normalizers") != []:
        raise Unsuited("it changes the text first")
    if described["model"].get("dropout"):
        raise Unsuited("it leaves merges to chance")
    parts = described["pre_tokenizer"] or {}
    parts = list(parts.get("pretokenizers", [parts] if parts else []))
    if parts and parts[0]["type"] == "ByteLevel" and parts[0].get("use_regex", True):
        parts[:1] = [_split(GPT2), {**parts[0], "use_regex": False}]
    count = next((i for i, part in enumerate(parts) if not _is_split(part)), len(parts))
    if count == 0:
        raise Unsuited("it does not begin by cutting at a regular expression")
    rest = parts[count:]
    if any(part["type"] not in ("ByteLevel", "Digits") or part.get("add_prefix_space") for part in rest):
        raise Unsuited("a word's tokens may depend on where it stands")
    if any(part.get("use_regex", part["type"] == "ByteLevel") for part in rest):
        raise Unsuited("it cuts words again")
    return parts[:count], rest


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _is_split(part: dict[str, Any]) -> bool:
    return part["type"] == "Split" and "Regex" in part["pattern"] and part == _split(part["pattern"]["Regex"])


def _cutter(pattern: str) -> Cut:
    """All matches of a pattern and what lies between them, in order.

    Raises:
        Unsuited
    """
    try:
        found = regex.compile(f"(?:{pattern})|(?:(?!{pattern})[\\s\\S])+")
        if regex.compile(pattern).match("") or found.groups:
            raise Unsuited(f"{pattern} has groups, or matches nothing")
    except regex.error as error:
        raise Unsuited(f"{pattern}: {error}") from error
    return found.findall


def _only(described: dict[str, Any], pre_tokenizer: dict[str, Any]) -> Tokenizer:
    """The tokenizer with another pre-tokenizer and no added tokens."""
    changed = {"added_tokens": [], "post_processor": None, "pre_tokenizer": pre_tokenizer}
    return Tokenizer.from_str(json.dumps({**described, **changed}))
