"""Texts too long to tokenize at once, split into segments whose tokens concatenate to the text's.

A segment ends at a word boundary of the tokenizer's pre-tokenizer, searched near every SEGMENT characters: after newlines before
a letter, or at a single space between two letters; in text without either (numbers, indented JSON), at any boundary on which the
pre-tokenizer agrees from several start positions. Every boundary is checked before use: the tokens of the WINDOW characters on
both sides must equal those of the two halves, and a pre-tokenizer must split there. A tokenizer without one (SentencePiece as in
Llama 2) treats a text as one word; then no token may continue past what precedes a space, and the space itself is dropped, since
the tokenizer prepends one to each text. If no boundary passes, the segment grows: text without spaces is never split for such a
tokenizer.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

from tokenizers import Tokenizer

from tasks.sources.shard import SourceError

SEGMENT = 1 << 18  # characters
WINDOW = 512  # characters on each side of a boundary
CANDIDATES = 32  # boundaries tried before a segment grows
READ = 1 << 22  # bytes
# Positions in a JSON string that split no escape, no surrogate pair and no UTF-8 sequence.
SAFE = re.compile(
    rb"(?<=[^\\]{6})(?=[^\x80-\xbf])|(?<=\\[nrt])|(?<=\\u(?![dD][89abAB])[\da-fA-F]{4})|(?=[ \xc2-\xf4])"
)
STARTS = 16  # consecutive start positions from which the pre-tokenizer must agree on a boundary
SEARCHES = 4  # positions in a segment around which boundaries are searched
BOUNDARIES = re.compile(r"(?<=\n)(?=[^\W\d_])|(?<=[^\W\d_]) (?=[^\W\d_])")
SPACES = re.compile(r"(?<=\S) ")


@dataclass(frozen=True)
class LongText:
    """A document as chunks of text."""

    # Starts reading from the beginning; may be called any number of times.
    chunks: Callable[[], Iterator[str]]

    def sha256(self) -> bytes:
        digest = hashlib.sha256()
        for chunk in self.chunks():
            digest.update(chunk.encode())
        return digest.digest()


def of_text(text: str) -> LongText:
    """A string in chunks."""
    return LongText(lambda: (text[start : start + SEGMENT] for start in range(0, len(text), SEGMENT)))


def of_file(open_binary: Callable[[], BinaryIO], name: str, start: int = 0) -> LongText:
    """A UTF-8 file in chunks, starting at a byte.

    Raises SourceError with `name` and the byte's position while reading.
    """

    def chunks() -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")()
        offset = start
        with open_binary() as file:
            file.seek(start)
            while True:
                data = file.read(READ)
                pending = len(decoder.getstate()[0])
                try:
                    yield decoder.decode(data, final=not data)
                except UnicodeDecodeError as error:
                    position = offset - pending + error.start
                    raise SourceError(f"{name}, byte {position}: not UTF-8 text") from error
                if not data:
                    return
                offset += len(data)

    return LongText(chunks)


def of_json(literal: memoryview, locate: Callable[[], str]) -> LongText:
    """Unquoted JSON string in UTF-8, decoded in chunks; `locate` gives the position for a SourceError."""

    def chunks() -> Iterator[str]:
        start = 0
        while start < len(literal):
            stop, length = len(literal), READ
            while start + length < len(literal):
                if safe := SAFE.search(literal, start + length, start + 2 * length):
                    stop = safe.start()
                    break
                length *= 2
            try:
                yield json.loads(f'"{bytes(literal[start:stop]).decode()}"')
            except ValueError as error:
                raise SourceError(f"{locate()}: invalid JSON: {error}") from error
            start = stop

    return LongText(chunks)


class TextSplitter:
    """Splits long texts for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._pre_tokenizer = tokenizer.pre_tokenizer
        self._one_word = self._pre_tokenizer is None or len(self._pre_tokenizer.pre_tokenize_str("a b")) == 1
        # Without a pre-tokenizer: whether every space starts a token.
        self._spaces_start_tokens = self._one_word and not any(
            re.search(r"[^▁ ][▁ ]", token) for token in tokenizer.get_vocab(with_added_tokens=False)
        )

    def split(self, text: LongText) -> Iterator[str]:
        """Segments of about SEGMENT characters, to be tokenized one by one."""
        buffer = ""
        length = SEGMENT
        for chunk in text.chunks():
            buffer += chunk
            while len(buffer) > length + WINDOW:
                boundary = self._boundary(buffer, length)
                if boundary is None:
                    length *= 2
                    continue
                yield buffer[: boundary[0]]
                buffer, length = buffer[boundary[1] :], SEGMENT
        if buffer:
            yield buffer

    def _boundary(self, text: str, length: int) -> tuple[int, int] | None:
        """End of the segment and start of the next: one of the last valid boundaries before `length`."""
        for end in self._candidates(text, length):
            for start in (end, end + 1) if text[end] == " " else (end,):
                if self._is_valid(text, end, start):
                    return end, start
        return None

    def _candidates(self, text: str, length: int) -> Iterator[int]:
        """Possible boundaries, the most likely first."""
        found = [match.start() for match in BOUNDARIES.finditer(text, length // 2, length)]
        yield from reversed(found[-CANDIDATES:])
        for i in range(SEARCHES):
            position = length - i * length // (2 * SEARCHES)
            yield from reversed(self._word_ends(text, position)[-CANDIDATES:])

    def _word_ends(self, text: str, position: int) -> list[int]:
        """Ends of words in the WINDOW characters before a position.

        In a word longer than the window, such as digits that are grouped by three, ends depend on the start of reading. Reading
        from STARTS consecutive positions includes a true word start if there is one, so the common ends are true ends.
        """
        low = max(0, position - WINDOW)
        if self._one_word:
            return [match.start() for match in SPACES.finditer(text, low, position)]
        common = set(range(low + STARTS, position + 1))
        for start in range(low, low + STARTS):
            words = self._pre_tokenizer.pre_tokenize_str(text[start : position + WINDOW])
            common &= {start + end for _, (_, end) in words}
        return sorted(common)

    def _is_valid(self, text: str, end: int, start: int) -> bool:
        """Whether splitting here leaves the tokens around the boundary unchanged."""
        before, after = text[max(0, end - WINDOW) : end], text[start : start + WINDOW]
        around = text[max(0, end - WINDOW) : start + WINDOW]
        if self._one_word:
            # Only at a space: without a pre-tokenizer, merges cross everything else.
            if not self._spaces_start_tokens or text[end] != " ":
                return False
        elif not any(stop == len(before) for _, (_, stop) in self._pre_tokenizer.pre_tokenize_str(around)):
            return False
        return self._ids(before) + self._ids(after) == self._ids(around)

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids
