"""What order the training data comes in: sample i of a run is a pure function of (seed, epoch, i).

The documents of all shards are one stream of T tokens. Window w of sequence length s is the tokens [w·s, w·s + s]: s + 1 of
them, since each predicts the next, so neighbours share one. There are n = ⌊(T - 1) / s⌋ windows; only the last, partial one
is left out. Epoch e visits them in the order of a permutation of [0, n) that is computed, not stored: a Feistel network
(Luby and Rackoff 1988) over the next power of four, keyed by seed and epoch, applied again while the result falls outside
(cycle walking, under four times on average). Nothing is built or held, whatever the corpus's size; resuming needs the sample
counter alone, and the data-parallel degree changes nothing.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from modeling.indexed import IndexedError, data_path, map_tokens, read_header

ROUNDS = 6
OPEN_SHARDS = 64  # each holds a file descriptor; systems commonly allow a process 1024


@dataclass
class Corpus:
    """The tokens of one split as one stream over many shards, mapped when first read and at most OPEN_SHARDS at a time.

    Attributes:
        prefixes: paths of the shards' `.bin`/`.idx` without the ending.
        counts: (shards) tokens in each.
        vocabulary_size: every token id is below it.
        eos: token id that ends each document, None where documents are not ended.
    """

    prefixes: list[Path]
    counts: np.ndarray
    vocabulary_size: int
    eos: int | None = None
    _open: OrderedDict[int, np.ndarray] = field(default_factory=OrderedDict, repr=False)

    def __post_init__(self) -> None:
        self.ends = np.cumsum(self.counts, dtype=np.int64)

    @classmethod
    def open(cls, folder: str | Path, split: str) -> Corpus:
        """The split "train" or "validation" of a dataset artifact; shards lie beside it in the same store.

        Raises:
            FileNotFoundError: the folder has no corpus.json.
            ValueError: corpus.json has no such split, or is of another format.
        """
        path = Path(folder) / "corpus.json"
        manifest = json.loads(path.read_text())
        if manifest.get("format") != 1:
            raise ValueError(f"{path}: format {manifest.get('format')!r}; only 1 is known")
        if split not in ("train", "validation"):
            raise ValueError(f'split {split!r} is not known; splits are "train" and "validation"')
        artifacts = Path(folder).absolute().parent.parent
        shards = [shard for shard in manifest[split] if shard["tokens"]]
        counts = np.array([shard["tokens"] for shard in shards], np.int64)
        prefixes = [artifacts / shard["path"] for shard in shards]
        return cls(prefixes, counts, manifest["vocabulary_size"], manifest["eos"])

    @property
    def tokens(self) -> int:
        return int(self.counts.sum())

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens (count), int64, from position `start` of the stream on, across shards.

        Raises:
            IndexError: the stream ends before.
            IndexedError: a shard that is not what corpus.json says, or a token beyond the vocabulary.
        """
        if start < 0 or start + count > self.tokens:
            raise IndexError(f"tokens [{start}, {start + count}) of a corpus of {self.tokens}")
        out = np.empty(count, np.int64)
        filled = 0
        shard = int(np.searchsorted(self.ends, start, side="right"))
        while filled < count:
            offset = start + filled - int(self.ends[shard] - self.counts[shard])
            part = self._shard(shard)[offset : offset + count - filled]
            if part.max() >= self.vocabulary_size or part.min() < 0:
                wrong = int(((part >= self.vocabulary_size) | (part < 0)).argmax())
                reason = f"token {part[wrong]} is not in the vocabulary of {self.vocabulary_size}"
                path = data_path(self.prefixes[shard])
                raise IndexedError(path, (offset + wrong) * part.dtype.itemsize, reason)
            out[filled : filled + len(part)] = part
            filled += len(part)
            shard += 1
        return out

    def _shard(self, i: int) -> np.ndarray:
        if i in self._open:
            self._open.move_to_end(i)
            return self._open[i]
        # In constant time; that no byte has changed since it was written is for the store to verify.
        tokens = map_tokens(self.prefixes[i], read_header(self.prefixes[i]).dtype)
        if len(tokens) != self.counts[i]:
            reason = f"has {len(tokens)} tokens, corpus.json says {self.counts[i]}"
            raise IndexedError(data_path(self.prefixes[i]), tokens.nbytes, reason)
        if len(self._open) >= OPEN_SHARDS:
            self._open.popitem(last=False)
        self._open[i] = tokens
        return tokens


class Samples:
    """Windows of a corpus in the order of training, or in their natural order where there is no seed (validation).

    Attributes:
        windows: number of them, one epoch.

    Raises:
        ValueError: the corpus has no whole window.
    """

    def __init__(self, corpus: Corpus, sequence_length: int, seed: int | None) -> None:
        self.corpus = corpus
        self.sequence_length = sequence_length
        self.seed = seed
        self.windows = (corpus.tokens - 1) // sequence_length
        if self.windows < 1:
            reason = f"a corpus of {corpus.tokens} tokens has no window of {sequence_length} + 1"
            raise ValueError(f"train.sequence_length = {sequence_length}: {reason}")

    def order(self, samples: np.ndarray) -> np.ndarray:
        """The window (count) that each sample (count) reads; samples count on from one epoch to the next."""
        samples = np.asarray(samples, np.int64)
        epochs, positions = np.divmod(samples, self.windows)
        if self.seed is None:
            return positions
        return permute(positions, self.windows, self.seed, epochs)

    def batch(self, first: int, count: int) -> np.ndarray:
        """Tokens (count, sequence length + 1), int64, of the samples [first, first + count)."""
        windows = self.order(np.arange(first, first + count))
        s = self.sequence_length
        rows = [self.corpus.read(int(window) * s, s + 1) for window in windows]
        return np.stack(rows)  # (count, s + 1)


def permute(values: np.ndarray, n: int, seed: int, epochs: np.ndarray) -> np.ndarray:
    """Where a permutation of [0, n), keyed by the seed and each value's epoch, takes each value (count) -> (count)."""
    half = np.uint64(max(1, (int(n - 1).bit_length() + 1) // 2))  # bits of a Feistel half
    low = (np.uint64(1) << half) - np.uint64(1)
    values = np.atleast_1d(values).astype(np.uint64)
    epochs = np.broadcast_to(epochs, values.shape).astype(np.uint64)
    seeds = _mix(np.full(values.shape, seed % 2**64, np.uint64))
    keys = [_mix(_mix(seeds ^ epochs) + np.uint64(i)) for i in range(ROUNDS)]
    outside = np.ones(values.shape, bool)
    while outside.any():
        left, right = values[outside] >> half, values[outside] & low
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key[outside]) & low)
        values[outside] = left << half | right
        outside = values >= n
    return values.astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    """A bijection of 64-bit words in which every input bit reaches every output bit (splitmix64's finalizer)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)
