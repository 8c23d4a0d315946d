"""Tokenization engines: gigatoken, a word cache or `tokenizers`, always with the ids of `tokenizers`.

`HuggingFaceEngine` supports every tokenizer. `GigatokenEngine` (MIT, github.com/marcelroed/gigatoken) is many times faster
where it supports a tokenizer; `WordCacheEngine` tokenizes each distinct word once, for tokenizers in SentencePiece's style. Both
are verified against `tokenizers`: before use on every added token, on random ids and on the first texts of each shard, then on
one short text of every batch.

Special tokens in text are encoded as plain text: "<|endoftext|>" in a document is thirteen characters, not an end of document.
Otherwise the author of a web page could end documents or begin chat turns inside the training data. Megatron's GPT-2 tokenizer
and tiktoken's `encode_ordinary` do the same, as do Hugging Face tokenizers with `split_special_tokens`. Added tokens that are
not special, such as runs of spaces, are recognized.
"""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from tasks.tokenization import tokenizer_files
from tasks.tokenization.word_cache import WordCache

log = logging.getLogger(__name__)

SAMPLE_CHARACTERS = 1 << 17  # on which an engine is verified before it is used
SPOT_CHECK_CHARACTERS = 4096  # maximum length of a batch's text that is encoded twice
RANDOM_TEXTS, RANDOM_IDS = 128, 32  # texts of random ids to verify an engine on, and ids in each
MANY_THREADS = 4  # from here on, `tokenizers` is faster than the word cache on one thread

# Texts that the first documents may lack: whitespace, digits, several scripts.
EDGE_CASES = (
    "1234567 12.5\t\n\n  x   y\r\n\r\nit's I'LL don’t",
    "naïve Ελλάδα Привет 日本語 한국어 العربية हिन्दी 👩‍👩‍👧 e\u0301",
)

Encoded = tuple[np.ndarray, np.ndarray]  # ids of all texts, concatenated, and the number of ids of each text


class EngineMismatch(RuntimeError):
    """An engine's ids differ from those of `tokenizers`; its earlier output cannot be trusted either."""


class HuggingFaceEngine:
    """`tokenizers`, on all threads of rayon's pool."""

    name = "tokenizers"  # in logs and reports

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Encode complete texts, without adding special tokens.

        Shapes:
            ids (total number of ids), counts (texts).
        """
        # encode_batch_fast is 25% slower in tokenizers 0.23.
        rows = [encoding.ids for encoding in self._tokenizer.encode_batch(texts, add_special_tokens=False)]
        counts = np.fromiter(map(len, rows), np.int64, len(rows))
        return np.fromiter(chain.from_iterable(rows), np.uint32, int(counts.sum())), counts


class VerifiedEngine(ABC):
    """An engine whose ids are compared with those of `tokenizers` on one short text of every batch."""

    name: str

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._reference = HuggingFaceEngine(tokenizer)

    def encode(self, texts: Sequence[str]) -> Encoded:
        """As `HuggingFaceEngine.encode`. Raises EngineMismatch."""
        ids, counts = self._encode(texts)
        spot = next((i for i, text in enumerate(texts) if 0 < len(text) <= SPOT_CHECK_CHARACTERS), None)
        if spot is not None:
            start = int(counts[:spot].sum())
            expected = self._reference.encode([texts[spot]])[0]
            self._require_equal(ids[start : start + int(counts[spot])], expected)
        return ids, counts

    def verify(self, sample: Sequence[str], probes: Sequence[str]) -> None:
        """Raises EngineMismatch unless the ids of all texts equal those of `tokenizers`."""
        texts = [*sample, *probes]
        for actual, expected in zip(self._encode(texts), self._reference.encode(texts), strict=True):
            self._require_equal(actual, expected)

    def _require_equal(self, actual: np.ndarray, expected: np.ndarray) -> None:
        if not np.array_equal(actual, expected):
            raise EngineMismatch(f"{self.name} and tokenizers encode the same text differently")

    @abstractmethod
    def _encode(self, texts: Sequence[str]) -> Encoded:
        """As `encode`, without the check."""


Engine = HuggingFaceEngine | VerifiedEngine


class GigatokenEngine(VerifiedEngine):
    name = "gigatoken"

    def __init__(self, tokenizer: Tokenizer, threads: int) -> None:
        super().__init__(tokenizer)
        import gigatoken

        self._parallel = threads > 1
        # From JSON: a `Tokenizer` without the special tokens would number the other added tokens anew.
        self._encoder = gigatoken.Tokenizer.from_json(json.dumps(_without_special_tokens(tokenizer)))

    def _encode(self, texts: Sequence[str]) -> Encoded:
        rows = self._encoder.encode_batch(list(texts), parallel=self._parallel).layout
        offsets = np.asarray(rows.offsets.data)
        return np.asarray(rows.content.data)[offsets[0] : offsets[-1]], np.diff(offsets)


class WordCacheEngine(VerifiedEngine):
    """`tokenizers` called once per distinct word, on one thread."""

    name = "tokenizers with word cache"

    def __init__(self, tokenizer: Tokenizer, threads: int) -> None:
        super().__init__(tokenizer)
        if threads >= MANY_THREADS:
            raise ValueError(f"tokenizers is faster on {threads} threads")
        self._cache = WordCache(_without_special_tokens(tokenizer))

    def verify(self, sample: Sequence[str], probes: Sequence[str]) -> None:
        super().verify(sample, probes)
        if not self._cache.is_effective(sample):
            raise ValueError("few words of the text repeat")

    def _encode(self, texts: Sequence[str]) -> Encoded:
        found = [self._cache.encode(text) for text in texts]
        rows = [row or b"" for row in found]
        if unsupported := [i for i, row in enumerate(found) if row is None]:
            ids, counts = self._reference.encode([texts[i] for i in unsupported])
            for i, row in zip(unsupported, np.split(ids, np.cumsum(counts)[:-1]), strict=True):
                rows[i] = row.tobytes()
        width = np.dtype(np.uintc).itemsize
        counts = np.fromiter((len(row) // width for row in rows), np.int64, len(rows))
        return np.frombuffer(b"".join(rows), np.uintc), counts


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer of an artifact's folder so that it encodes special tokens in text as plain text."""
    tokenizer = tokenizer_files.load(folder)
    tokenizer.encode_special_tokens = True
    return tokenizer


def choose_engine(tokenizer: Tokenizer, sample: Sequence[str], threads: int = 1) -> Engine:
    """Fastest engine verified for the tokenizer and sample; logs why others are not used."""
    probes = [*EDGE_CASES, *_added_token_texts(tokenizer), *_random_texts(tokenizer)]
    for kind in (GigatokenEngine, WordCacheEngine):
        try:
            engine = kind(tokenizer, threads)
            engine.verify(sample, probes)
            return engine
        except ImportError:
            reason = "it is not installed"
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in gigatoken's Rust code is a BaseException
            reason = " ".join(str(error).split())[:200]
        log.info("not tokenizing with %s: %s", kind.name, reason)
    return HuggingFaceEngine(tokenizer)


def _added_token_texts(tokenizer: Tokenizer) -> Iterator[str]:
    """Every added token, special or not: alone, within a word, between words, and beside another."""
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    for token, other in zip(added, [*added[1:], *added[:1]], strict=True):
        yield token
        yield f"a{token}b {token} c\n  {token}\t\n.{token}{other}"


def _random_texts(tokenizer: Tokenizer) -> list[str]:
    """What random ids decode to, the same for equal tokenizers."""
    ids = sorted(tokenizer.get_vocab(with_added_tokens=True).values())
    rows = np.random.default_rng(0).choice(ids, (RANDOM_TEXTS, RANDOM_IDS))
    return tokenizer.decode_batch(rows.tolist(), skip_special_tokens=False)


def _without_special_tokens(tokenizer: Tokenizer) -> dict[str, Any]:
    """JSON of the tokenizer without special tokens; each other token has its id in it."""
    state: dict[str, Any] = json.loads(tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if not token["special"]]
    state["post_processor"] = None
    return state
