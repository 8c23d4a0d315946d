"""Text to token ids, by one of several engines behind one seam; no text becomes a special token.

`tokenizers` takes every tokenizer. `gigatoken` (MIT, github.com/marcelroed/gigatoken) is many times as fast where it takes a
tokenizer; where it does not, `tokenizers` is asked once for each word, if the tokenizer goes by words. Both are believed
only as far as they are checked: on the first texts of each shard, and then on one short text of every batch, their ids must be
those of `tokenizers` on the whole text.

The text "<|endoftext|>" in a document is thirteen characters that somebody wrote, not an end: with special tokens recognized
in text, whoever writes a web page could end documents, or begin turns of a chat, inside the training data. So these are
taken as any other text, as Megatron's own GPT-2 tokenizer and tiktoken's `encode_ordinary` do (Hugging Face's tokenizers do so
where `split_special_tokens` is set, not by default). Added tokens that are not
special, such as runs of spaces, are recognized as ever.
"""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from tokenizers import Tokenizer

from tasks.tokenization.tokenizer_files import load as load_tokenizer
from tasks.tokenization.word_cache import Unsuited, words_of

log = logging.getLogger(__name__)

SAMPLE = 1 << 17  # characters that both engines take before the faster is believed
SPOT = 4096  # length in characters up to which a text of a batch is taken by both
MANY = 4  # threads of `tokenizers` that are faster than one that goes by words

Encoded = tuple[np.ndarray, np.ndarray]  # ids of all texts, one after another, and how many each has


class Disagreement(RuntimeError):
    """An engine gave other tokens than `tokenizers`: what it gave before is in doubt too."""


class Engine(Protocol):
    """Encodes texts whole, without special tokens."""

    name: str

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Ids of all texts, and their counts (texts)."""


class General:
    """`tokenizers`, on all cores that rayon has."""

    name = "tokenizers"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, texts: Sequence[str]) -> Encoded:
        # Not encode_batch_fast: in tokenizers 0.23 it takes a quarter longer.
        ids = [found.ids for found in self._tokenizer.encode_batch(texts, add_special_tokens=False)]
        counts = np.fromiter(map(len, ids), np.int64, len(ids))
        flat = np.empty(int(counts.sum()), np.uint32)
        at = 0
        for row in ids:
            flat[at : at + len(row)] = row
            at += len(row)
        return flat, counts


class Checked(ABC):
    """An engine that is held against `tokenizers` on one short text of every batch."""

    name: str

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._general = General(tokenizer)

    def encode(self, texts: Sequence[str]) -> Encoded:
        flat, counts = self._encode(texts)
        spot = next((i for i, text in enumerate(texts) if 0 < len(text) <= SPOT), None)
        if spot is not None:
            start = int(counts[:spot].sum())
            self._same(self._general.encode([texts[spot]])[0], flat[start : start + int(counts[spot])])
        return flat, counts

    def agree(self, texts: Sequence[str]) -> None:
        """Raises Disagreement unless both engines make the same tokens of all these texts."""
        for mine, other in zip(self._encode(texts), self._general.encode(texts), strict=True):
            self._same(mine, other)

    def _same(self, mine: np.ndarray, other: np.ndarray) -> None:
        if not np.array_equal(mine, other):
            raise Disagreement(f"{self.name} and tokenizers make different tokens of the same text")

    @abstractmethod
    def _encode(self, texts: Sequence[str]) -> Encoded:
        """As `encode`, unchecked."""


class Fast(Checked):
    """`gigatoken`."""

    name = "gigatoken"

    def __init__(self, tokenizer: Tokenizer, threads: int) -> None:
        super().__init__(tokenizer)
        import gigatoken

        self._parallel = threads > 1
        self._encoder = gigatoken.Tokenizer(_without_special(tokenizer))

    def _encode(self, texts: Sequence[str]) -> Encoded:
        rows = self._encoder.encode_batch(list(texts), parallel=self._parallel).layout
        offsets = np.asarray(rows.offsets.data)
        return np.asarray(rows.content.data)[offsets[0] : offsets[-1]], np.diff(offsets)


class ByWords(Checked):
    """`tokenizers`, asked once for each word; on one core."""

    name = "tokenizers by words"

    def __init__(self, tokenizer: Tokenizer, threads: int) -> None:
        super().__init__(tokenizer)
        if threads >= MANY:
            raise Unsuited(f"{threads} threads of tokenizers are faster")
        self._words = words_of(_without_special(tokenizer))

    def agree(self, texts: Sequence[str]) -> None:
        super().agree(texts)
        if not self._words.recur(texts):
            raise Unsuited("its words hardly come again")

    def _encode(self, texts: Sequence[str]) -> Encoded:
        found = [self._words.ids(text) for text in texts]
        whole = [i for i, ids in enumerate(found) if ids is None]
        if whole:
            flat, counts = self._general.encode([texts[i] for i in whole])
            for i, ids in zip(whole, np.split(flat, np.cumsum(counts)[:-1]), strict=True):
                found[i] = ids.tobytes()
        width = np.dtype(np.uintc).itemsize
        counts = np.fromiter((len(ids) // width for ids in found), np.int64, len(found))
        return np.frombuffer(b"".join(found), np.uintc), counts


def load(folder: Path) -> Tokenizer:
    """The tokenizer of an artifact's folder, which takes special tokens as text."""
    loaded = load_tokenizer(folder)
    loaded.encode_special_tokens = True
    return loaded


def choose(tokenizer: Tokenizer, sample: Sequence[str], threads: int = 1) -> Engine:
    """The fastest engine that takes the tokenizer and agrees with `tokenizers` on the sample; why others do not is logged."""
    texts = [*sample, *_traps(tokenizer)]
    for kind in (Fast, ByWords):
        try:
            engine = kind(tokenizer, threads)
            engine.agree(texts)
            return engine
        except ImportError:
            reason = "it is not installed"
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of gigatoken's Rust code is no Exception
            reason = " ".join(str(error).split())[:200]
        log.info("not tokenizing with %s: %s", kind.name, reason)
    return General(tokenizer)


def _traps(tokenizer: Tokenizer) -> list[str]:
    """Texts that the data's first documents need not have: added tokens written out, spaces, digits, several scripts."""
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()][:64]
    return [
        f"a {' '.join(added)} b{''.join(added)}",
        "1234567 12.5\t\n\n  x   y\r\n\r\nit's I'LL don’t",
        "naïve Ελλάδα Привет 日本語 한국어 العربية हिन्दी 👩‍👩‍👧 e\u0301",
    ]


def _without_special(tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer, which knows no special tokens."""
    described = json.loads(tokenizer.to_str())
    described["added_tokens"] = [token for token in described["added_tokens"] if not token["special"]]
    described["post_processor"] = None
    return Tokenizer.from_str(json.dumps(described))
