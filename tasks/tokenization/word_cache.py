"""Texts as the words that a tokenizer itself cuts them into, each of which is tokenized once.

What a tokenizer makes of a word depends on that word alone, and most words of a text have been seen before, so that a
dictionary answers for them, and `tokenizers` is asked for new ones only: two to three times the speed on one core. One
that is full becomes the older of two generations, and what comes again is taken over from it into the new one: names
that one text is full of are soon forgotten.

    expression   a byte-level tokenizer (GPT-2, Llama 3, DeepSeek) cuts by regular expressions before it merges
    space        one of SentencePiece's kind (Llama 2) writes a mark for a space, with which a word begins; where it does not cut
                 there, no merge reaches over what stands before a mark, which its vocabulary shows

Two engines of regular expressions, Oniguruma in `tokenizers` and Python's `regex`, may know other editions of Unicode. So each
character is tried between letters, digits, spaces and marks before the first text with it, and texts with one that
the two take for different things are left to `tokenizers`.
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
LONGEST = 64  # characters of a word that is remembered
MOST = 200_000  # words that are, of each of two generations: 64 MB for words of nine letters
RECUR = 0.5  # share of the words of a sample that may be new
PROBE = "a{0}a 1{0}1 {0} .{0}. '{0}'s{0}{0}\n{0}\n\n{0}\t"

Cut = Callable[[str], list[str]]


class Unsuited(ValueError):
    """The tokenizer does not go by words, or by others than are known here."""


class Words(dict[str, bytes], ABC):
    """Word -> its ids as C unsigned ints; a word that is not there is tokenized.

    Args:
        described: the tokenizer, without special tokens.
        rest: the parts of its pre-tokenizer that see words.
    """

    def __init__(self, described: dict[str, Any], rest: Sequence[dict[str, Any]] = ()) -> None:
        super().__init__()
        self._older: dict[str, bytes] = {}
        self._word = _only(described, rest)
        added = [token["content"] for token in described["added_tokens"]]
        self._added = regex.compile("|".join(map(regex.escape, added))) if added else None

    def __missing__(self, word: str) -> bytes:
        ids = self._older.get(word)
        if ids is None:
            ids = array("I", self._word.encode(self.spelled(word), add_special_tokens=False).ids).tobytes()
        if len(word) <= LONGEST:
            if len(self) >= MOST:
                self._older = dict(self)
                self.clear()
            self[word] = ids
        return ids

    def ids(self, text: str) -> bytes | None:
        """The text's ids as C unsigned ints; None for a text that `tokenizers` must take whole."""
        if self._added and self._added.search(text):
            return None
        return b"".join(map(self.__getitem__, self.cut(text)))

    def recur(self, texts: Sequence[str]) -> bool:
        """Whether words come again often enough in these texts to be worth a dictionary."""
        words = [word for text in texts for word in self.cut(text)]
        return len(set(words)) <= RECUR * len(words)

    @abstractmethod
    def cut(self, text: str) -> Iterable[str]:
        """Its words."""

    def spelled(self, word: str) -> str:
        """A word as the model is to see it."""
        return word


def words_of(tokenizer: Tokenizer) -> Words:
    """Of a tokenizer without special tokens.

    Raises:
        Unsuited: it cuts neither by a regular expression nor at spaces; it changes the text first; or it leaves merges to chance.
    """
    described = json.loads(tokenizer.to_str())
    if described["model"].get("dropout"):
        raise Unsuited("it leaves merges to chance")
    mark = _mark(described)
    return ByExpression(described) if mark is None else BySpace(described, mark)


class BySpace(Words):
    """Words that begin with a space, for which the model sees a mark."""

    def __init__(self, described: dict[str, Any], mark: str) -> None:
        super().__init__(described)
        cuts = described["pre_tokenizer"]
        if described["normalizer"] and any(token["normalized"] for token in described["added_tokens"]):
            raise Unsuited("it looks for added tokens in what it has changed")
        self._mark = mark
        self._prefix = "" if cuts and cuts["prepend_scheme"] == "never" else " "
        self._always = cuts is None  # else not before a text that begins with one
        apart = cuts is not None and cuts["split"]
        if not apart:
            _require_marks_first(described["model"], mark)
        self._find = regex.compile(" [^ ]*|[^ ]+" if apart else " *[^ ]+| +").findall
        self._alone = apart and bool(self._prefix)  # each word has one space, and goes without it

    def cut(self, text: str) -> list[str]:
        if self._mark in text:
            text = text.replace(self._mark, " ")
        if text and (self._always or not text.startswith(" ")):
            text = self._prefix + text
        return text.split(" ")[1:] if self._alone else self._find(text)

    def spelled(self, word: str) -> str:
        return self._mark + word if self._alone else word.replace(" ", self._mark)


class ByExpression(Words):
    """Words that regular expressions find, one after another."""

    def __init__(self, described: dict[str, Any]) -> None:
        stages, rest = _stages(described)
        super().__init__(described, rest)
        self._cuts = [_cutter(stage["pattern"]["Regex"]) for stage in stages]
        self._theirs = _only(described, stages).pre_tokenizer
        self._alike: set[str] = set()
        self._unlike: set[str] = set()
        self._try(map(chr, range(128)))
        self._ascii = not self._unlike

    def ids(self, text: str) -> bytes | None:
        if not (self._ascii and text.isascii()):
            characters = set(text)
            self._try(characters - self._alike - self._unlike)
            if not self._unlike.isdisjoint(characters):
                return None
        return super().ids(text)

    def cut(self, text: str) -> Iterable[str]:
        first, *more = self._cuts
        words: Iterable[str] = first(text)
        for cut in more:
            words = chain.from_iterable(map(cut, words))
        return words

    def _try(self, characters: Iterable[str]) -> None:
        for character in characters:
            probe = PROBE.format(character)
            theirs = [probe[begin:end] for _, (begin, end) in self._theirs.pre_tokenize_str(probe)]
            (self._alike if list(self.cut(probe)) == theirs else self._unlike).add(character)


def _mark(described: dict[str, Any]) -> str | None:
    """What a tokenizer of SentencePiece's kind writes for a space; None for any other tokenizer."""
    normalizer, cuts = described["normalizer"], described["pre_tokenizer"]
    if cuts and cuts["type"] == "Metaspace" and normalizer is None:
        return cuts["replacement"]
    if cuts is None and normalizer and len(parts := normalizer.get("normalizers", [])) == 2:
        mark = parts[0].get("prepend")
        spaces = {"type": "Replace", "pattern": {"String": " "}, "content": mark}
        if parts == [{"type": "Prepend", "prepend": mark}, spaces]:
            return mark
    return None


def _require_marks_first(model: dict[str, Any], mark: str) -> None:
    """Raises Unsuited where a text is not the sum of its words, though they are not cut."""
    alone = model["type"] == "BPE" and mark in model["vocab"] and not model.get("ignore_merges")
    placed = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
    if not alone or placed or any(mark in token.lstrip(mark) for token in model["vocab"]):
        raise Unsuited("its tokens may reach over spaces")


def _stages(described: dict[str, Any]) -> tuple[list[dict], list[dict]]:
    """What cuts by regular expressions, and the parts after it, which see words.

    Raises:
        Unsuited
    """
    normalizer = described["normalizer"]
    if normalizer and normalizer.get("normalizers") != []:
        raise Unsuited("it changes the text first")
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


def _only(described: dict[str, Any], pre_tokenizers: Sequence[dict[str, Any]]) -> Tokenizer:
    """The tokenizer with these pre-tokenizers, and neither a normalizer nor added tokens."""
    cuts = {"type": "Sequence", "pretokenizers": list(pre_tokenizers)}
    changed = {"normalizer": None, "added_tokens": [], "post_processor": None, "pre_tokenizer": cuts}
    return Tokenizer.from_str(json.dumps({**described, **changed}))
