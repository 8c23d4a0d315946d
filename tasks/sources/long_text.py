"""Texts too long to be tokenized at once, in pieces whose tokens joined are those of the whole.

A piece ends where the tokenizer's own pre-tokenizer ends a word, found near every PIECE characters: after the newlines before a
letter, or at the single space between two letters; in text that has neither (numbers, indented JSON) at any word's end on
which the pre-tokenizer settles from wherever it begins to read. Each place is proved before it is used: the tokens of the
WINDOW characters around it must be those of its two halves, and where there is a pre-tokenizer it must cut there. A tokenizer
without one (SentencePiece's as Llama 2 has it) takes a text as one word; there the vocabulary must have no token that reaches
over what comes before a space, and the space itself goes, since the tokenizer puts one before each text. Where no place is
proved the piece grows: a text without spaces, for such a tokenizer, is never cut.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tokenizers import Tokenizer

from tasks.sources.shard import SourceError

PIECE = 1 << 18  # characters
WINDOW = 512  # characters on each side of a cut
CANDIDATES = 32  # places tried before a piece grows
READ = 1 << 22  # bytes
# Within JSON's string, where no escape is cut, nor a surrogate pair, nor a character's bytes.
SAFE = re.compile(
    rb"(?<=[^\\]{6})(?=[^\x80-\xbf])|(?<=\\[nrt])|(?<=\\u(?![dD][89abAB])[\da-fA-F]{4})|(?=[ \xc2-\xf4])"
)
STARTS = 16  # places, one after another, from which the pre-tokenizer must come to the same end of a word
WINDOWS = 4  # stretches of a piece that are searched for an end of a word
PLACES = re.compile(r"(?<=\n)(?=[^\W\d_])|(?<=[^\W\d_]) (?=[^\W\d_])")
SPACES = re.compile(r"(?<=\S) ")


@dataclass(frozen=True)
class LongText:
    """A document as chunks of text, which can be read any number of times.

    Attributes:
        chunks: begins to read it.
    """

    chunks: Callable[[], Iterator[str]]


def of_text(text: str) -> LongText:
    return LongText(lambda: (text[at : at + PIECE] for at in range(0, len(text), PIECE)))


def of_file(open_binary: Callable[[], object], name: str) -> LongText:
    """A file of UTF-8 text."""

    def chunks() -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")()
        at = 0
        with open_binary() as file:
            while True:
                data = file.read(READ)
                pending = len(decoder.getstate()[0])
                try:
                    yield decoder.decode(data, final=not data)
                except UnicodeDecodeError as error:
                    place = at - pending + error.start
                    raise SourceError(f"{name}, byte {place}: is not UTF-8 text") from error
                if not data:
                    return
                at += len(data)

    return LongText(chunks)


def of_json(literal: memoryview, place: Callable[[], str]) -> LongText:
    """A string as JSON has it, in UTF-8, without its quotes; decoded as it is read."""

    def chunks() -> Iterator[str]:
        at = 0
        while at < len(literal):
            end, reach = len(literal), READ
            while at + reach < len(literal):
                found = SAFE.search(literal, at + reach, at + 2 * reach)
                if found:
                    end = found.start()
                    break
                reach *= 2
            try:
                yield json.loads(f'"{bytes(literal[at:end]).decode()}"')
            except ValueError as error:
                raise SourceError(f"{place()}: is not JSON: {error}") from error
            at = end

    return LongText(chunks)


class Cutter:
    """Cuts long texts for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._words = tokenizer.pre_tokenizer
        self._whole = self._words is None or len(self._words.pre_tokenize_str("a b")) == 1
        # Without a pre-tokenizer, whether no token joins a letter to what follows a space.
        self._spaces_begin = self._whole and not any(
            re.search(r"[^▁ ][▁ ]", token) for token in tokenizer.get_vocab(with_added_tokens=False)
        )

    def pieces(self, text: LongText) -> Iterator[str]:
        """The text in pieces of about PIECE characters, to be tokenized one by one."""
        buffer = ""
        reach = PIECE
        for chunk in text.chunks():
            buffer += chunk
            while len(buffer) > reach + WINDOW:
                cut = self._cut(buffer, reach)
                if cut is None:
                    reach *= 2
                    continue
                yield buffer[: cut[0]]
                buffer, reach = buffer[cut[1] :], PIECE
        if buffer:
            yield buffer

    def _cut(self, text: str, reach: int) -> tuple[int, int] | None:
        """Where the piece ends and where the next begins, one of the last such places before `reach`."""
        for at in self._places(text, reach):
            for next_at in (at, at + 1) if text[at] == " " else (at,):
                if self._proved(text, at, next_at):
                    return at, next_at
        return None

    def _places(self, text: str, reach: int) -> Iterator[int]:
        """Where a text might be cut, the best first."""
        found = [place.start() for place in PLACES.finditer(text, reach // 2, reach)]
        yield from reversed(found[-CANDIDATES:])
        for i in range(WINDOWS):
            near = reach - i * reach // (2 * WINDOWS)
            yield from reversed(self._ends(text, near)[-CANDIDATES:])

    def _ends(self, text: str, near: int) -> list[int]:
        """Where words end in the WINDOW characters before `near`.

        In a run longer than a window, of digits that are taken three by three, the ends depend on where reading begins. So it
        begins at STARTS places: where the text itself has a word's end at one of them, what all have in common is its own too.
        """
        low = max(0, near - WINDOW)
        if self._whole:
            return [place.start() for place in SPACES.finditer(text, low, near)]
        common = set(range(low + STARTS, near + 1))
        for start in range(low, low + STARTS):
            words = self._words.pre_tokenize_str(text[start : near + WINDOW])
            common &= {start + end for _, (_, end) in words}
        return sorted(common)

    def _proved(self, text: str, at: int, next_at: int) -> bool:
        before, after = text[max(0, at - WINDOW) : at], text[next_at : next_at + WINDOW]
        around = text[max(0, at - WINDOW) : next_at + WINDOW]
        if self._whole:
            # Cut at a space, or not at all: what has no pre-tokenizer merges over everything else.
            if not self._spaces_begin or text[at] != " ":
                return False
        elif not any(end == len(before) for _, (_, end) in self._words.pre_tokenize_str(around)):
            return False
        return self._ids(before) + self._ids(after) == self._ids(around)

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids
