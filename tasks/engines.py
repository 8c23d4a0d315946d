"""Text to token ids, by either of two engines behind one seam; no text becomes a special token.

`tokenizers` takes every tokenizer. `gigatoken` (MIT, github.com/marcelroed/gigatoken) is several times as fast where it takes a
tokenizer, and is believed only as far as it is checked: on the first texts of each shard, and then on one short text of every
batch, its ids must be those of `tokenizers`.

The text "<|endoftext|>" in a document is thirteen characters that somebody wrote, not an end: with special tokens recognized
in text, whoever writes a web page could end documents, or begin turns of a chat, inside the training data. So these are
taken as any other text, as Megatron's own GPT-2 tokenizer and tiktoken's `encode_ordinary` do (Hugging Face's tokenizers do so
where `split_special_tokens` is set, not by default). Added tokens that are not
special, such as runs of spaces, are recognized as ever.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from tokenizers import Tokenizer

from tasks.tokenizer import load as load_tokenizer

log = logging.getLogger(__name__)

SAMPLE = 1 << 17  # characters that both engines take before the faster is believed
SPOT = 4096  # length in characters up to which a text of a batch is taken by both

Encoded = tuple[np.ndarray, np.ndarray]  # ids of all texts, one after another, and how many each has


class Disagreement(RuntimeError):
    """The fast engine gave other tokens than `tokenizers`: what it gave before is in doubt too."""


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
        ids = [found.ids for found in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
        counts = np.fromiter(map(len, ids), np.int64, len(ids))
        flat = np.empty(int(counts.sum()), np.uint32)
        at = 0
        for row in ids:
            flat[at : at + len(row)] = row
            at += len(row)
        return flat, counts


class Fast:
    """`gigatoken`, checked against `tokenizers` on one short text of every batch."""

    name = "gigatoken"

    def __init__(self, tokenizer: Tokenizer, threads: int) -> None:
        import gigatoken

        self._parallel = threads > 1
        self._encoder = gigatoken.Tokenizer(_without_special(tokenizer))
        self._general = General(tokenizer)

    def encode(self, texts: Sequence[str]) -> Encoded:
        flat, counts = self._encode(texts)
        spot = next((i for i, text in enumerate(texts) if 0 < len(text) <= SPOT), None)
        if spot is not None:
            start = int(counts[:spot].sum())
            same(self._general.encode([texts[spot]])[0], flat[start : start + int(counts[spot])])
        return flat, counts

    def agree(self, texts: Sequence[str]) -> None:
        """Raises Disagreement unless both engines make the same tokens of all these texts."""
        for mine, other in zip(self._encode(texts), self._general.encode(texts), strict=True):
            same(mine, other)

    def _encode(self, texts: Sequence[str]) -> Encoded:
        rows = self._encoder.encode_batch(list(texts), parallel=self._parallel).layout
        offsets = np.asarray(rows.offsets.data)
        return np.asarray(rows.content.data)[offsets[0] : offsets[-1]], np.diff(offsets)


def same(mine: np.ndarray, other: np.ndarray) -> None:
    if not np.array_equal(mine, other):
        raise Disagreement("gigatoken and tokenizers make different tokens of the same text")


def load(folder: Path) -> Tokenizer:
    """The tokenizer of an artifact's folder, which takes special tokens as text."""
    loaded = load_tokenizer(folder)
    loaded.encode_special_tokens = True
    return loaded


def choose(tokenizer: Tokenizer, sample: Sequence[str], threads: int = 1) -> Engine:
    """The fast engine if it is here, takes the tokenizer and agrees on the sample; else the general one, and why is logged."""
    reason = ""
    try:
        fast = Fast(tokenizer, threads)
        fast.agree([*sample, *_traps(tokenizer)])
        return fast
    except ImportError:
        reason = "gigatoken is not installed"
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of its Rust code is no Exception
        reason = f"gigatoken does not do for this tokenizer: {' '.join(str(error).split())[:200]}"
    log.info("tokenizing with tokenizers, not gigatoken: %s", reason)
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
