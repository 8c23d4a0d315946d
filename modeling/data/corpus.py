"""The training data as samples: sample i of a run is a pure function of (seed, i), whatever the ranks and the past.

The documents of a stream's shards are one row of T tokens. Window w of sequence length s is the tokens [w·s, w·s + s]: s + 1 of
them, since each predicts the next, so neighbours share one. There are n = ⌊(T - 1) / s⌋ windows; only the last, partial one
is left out. All shards are one stream, or each source is one where sources have weights; order.py says which window comes when.
Nothing is built or held, whatever the corpus's size: 10^12 tokens in 20,000 shards open in a fraction of a second. Resuming
needs the sample counter alone.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from modeling.data.indexed import IndexedError, data_path, map_index, map_tokens, read_header
from modeling.data.sample_order import Windows, blend, stream_seed
from modeling.data.shard_cache import Stage

OPEN_SHARDS = (
    64  # of this machine; each holds two file descriptors, and systems commonly allow a process 1024
)
AHEAD = 2  # spans whose shards are staged: the one that is read, and the next


class Stream(NamedTuple):
    """A row of tokens within a corpus: its share of the samples, where it starts, and how many tokens it has."""

    weight: float
    start: int
    tokens: int


@dataclass(frozen=True)
class Open:
    """A shard that is mapped: the tokens of its split, and where they start in its file."""

    tokens: np.ndarray
    start: int
    prefix: Path

    @cached_property
    def documents(self) -> tuple[np.ndarray, np.ndarray]:
        """Pointers of its sequences, and the sequence that each document starts with; mapped when first asked for."""
        index = map_index(self.prefix, read_header(self.prefix))
        return index.pointers, index.document_indices

    def read(self, offset: int, count: int, vocabulary_size: int) -> np.ndarray:
        """A copy of these tokens (count). Raises IndexedError where one is beyond the vocabulary."""
        part = self.tokens[offset : offset + count]
        if part.max() >= vocabulary_size or part.min() < 0:
            i = int(((part >= vocabulary_size) | (part < 0)).argmax())
            reason = f"token {part[i]} is not in the vocabulary of {vocabulary_size}"
            raise IndexedError(data_path(self.prefix), (self.start + offset + i) * part.itemsize, reason)
        return part.astype(np.int64)

    def begins(self, offset: int, count: int) -> np.ndarray:
        """The places among these tokens (count) where documents begin, in log₂(documents) looks at the index."""
        size = self.tokens.itemsize
        pointers, indices = self.documents

        def begin(sequence: int) -> float:
            return pointers[sequence] if sequence < len(pointers) else float("inf")

        offset += self.start
        first = bisect_right(indices, offset * size, key=begin)
        last = bisect_left(indices, (offset + count) * size, lo=first, key=begin)
        return pointers[indices[first:last]] // size - offset


@dataclass
class Corpus:
    """The tokens of one split over many shards, mapped when read; of those on this machine OPEN_SHARDS stay so.

    Attributes:
        paths: of the shards' `.bin`/`.idx` without the ending; of those in the store, from its artifacts on.
        counts: (shards) tokens in each.
        starts: (shards) token of its file that each starts with.
        vocabulary_size: every token id is below it.
        artifacts: folder of the store's artifacts, where they are on this machine.
        eos: token id that ends each document, None where documents are not ended.
        streams: rows of tokens that samples are drawn from.
        span: tokens that are shuffled together; None: all of a stream.
        stage: where shards that are elsewhere are copied to.
    """

    paths: list[str]
    counts: np.ndarray
    starts: np.ndarray
    vocabulary_size: int
    artifacts: Path
    eos: int | None = None
    streams: list[Stream] = field(default_factory=list)
    span: int | None = None
    stage: Stage | None = None
    _open: OrderedDict[int, Open] = field(default_factory=OrderedDict, repr=False)

    def __post_init__(self) -> None:
        self.ends = np.cumsum(self.counts, dtype=np.int64)
        self.streams = self.streams or [Stream(1.0, 0, self.tokens)]

    @classmethod
    def open(cls, folder: str | Path, split: str, stage: Stage | None = None) -> Corpus:
        """The split "train" or "validation" of a dataset artifact.

        Args:
            stage: where shards are copied to; without it those of the store lie beside the folder.

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
        entries = manifest[split]
        counts = np.array([shard["tokens"] for shard in entries], np.int64)
        if stage:
            stage.anonymous |= {shard["path"] for shard in entries if shard.get("anonymous")}
        weighted = manifest.get("blend") if split == "train" else None
        return cls(
            [shard["path"] for shard in entries],
            counts,
            np.array([shard.get("start", 0) for shard in entries], np.int64),
            manifest["vocabulary_size"],
            Path(folder).absolute().parent.parent,
            manifest["eos"],
            _streams(weighted, counts) if weighted else [],
            manifest.get("span") if split == "train" else None,
            stage,
        )

    @property
    def tokens(self) -> int:
        return int(self.counts.sum())

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens (count), int64, from position `start` on, across shards.

        Raises:
            IndexError: the corpus ends before.
            IndexedError: a shard that is not what corpus.json says, or a token beyond the vocabulary.
        """
        out = np.empty(count, np.int64)
        filled = 0
        for i, offset, length in self._parts(start, count):
            look = partial(Open.read, offset=offset, count=length, vocabulary_size=self.vocabulary_size)
            out[filled : filled + length] = self._look(i, look)
            filled += length
        return out

    def documents(self, start: int, count: int) -> np.ndarray:
        """For each of the tokens (count) from `start` on, the place among them where its document begins, int64.

        A document that begins before them begins with them.
        """
        out = np.zeros(count, np.int64)
        filled = 0
        for i, offset, length in self._parts(start, count):
            places = filled + self._look(i, partial(Open.begins, offset=offset, count=length))
            out[filled], out[places] = filled, places
            filled += length
        return np.maximum.accumulate(out)

    def ahead(self, start: int, count: int) -> None:
        """Begin to stage the shards of these tokens, where shards are staged."""
        if self.stage:
            self.stage.ahead(self.paths[i] for i, _, _ in self._parts(start, count) if self._staged(i))

    def _parts(self, start: int, count: int) -> list[tuple[int, int, int]]:
        """Shard, token of its split and number of tokens, of each part of [start, start + count)."""
        if start < 0 or start + count > self.tokens:
            raise IndexError(f"tokens [{start}, {start + count}) of a corpus of {self.tokens}")
        parts = []
        i = int(np.searchsorted(self.ends, start, side="right"))
        while count:
            offset = start - int(self.ends[i] - self.counts[i])
            length = min(count, int(self.counts[i]) - offset)
            if length:
                parts.append((i, offset, length))
            start, count, i = start + length, count - length, i + 1
        return parts

    def _staged(self, i: int) -> bool:
        return self.stage is not None and self.stage.has(self.paths[i])

    def _look(self, i: int, look: Callable[[Open], np.ndarray]) -> np.ndarray:
        """What `look` finds in a shard, a copy; one that is staged is closed after it, so that others can have its disk."""
        if self._staged(i):
            with self.stage.held(self.paths[i]) as prefix:
                return look(self._map(i, prefix))
        if i not in self._open:
            if len(self._open) >= OPEN_SHARDS:
                self._open.popitem(last=False)
            self._open[i] = self._map(i, self.artifacts / self.paths[i])
        self._open.move_to_end(i)
        return look(self._open[i])

    def _map(self, i: int, prefix: Path) -> Open:
        # In constant time; that no byte has changed since it was written is for the store to verify.
        tokens = map_tokens(prefix, read_header(prefix).dtype)
        start, count = int(self.starts[i]), int(self.counts[i])
        part = tokens[start : start + count]
        if len(part) != count:
            reason = f"has {len(tokens)} tokens, corpus.json says {start + count}"
            raise IndexedError(data_path(prefix), tokens.nbytes, reason)
        return Open(part, start, prefix)


def _streams(blend: list[dict[str, float]], counts: np.ndarray) -> list[Stream]:
    """One stream a source that has a weight."""
    streams, shard, start = [], 0, 0
    for source in blend:
        tokens = int(counts[shard : shard + source["shards"]].sum())
        if source["weight"]:
            streams.append(Stream(source["weight"], start, tokens))
        shard, start = shard + source["shards"], start + tokens
    return streams


class Samples:
    """Windows of a corpus in the order of training, or in their natural order where there is no seed (validation).

    Attributes:
        windows: number of them, one epoch of every stream.

    Raises:
        ValueError: a stream has no whole window.
    """

    def __init__(self, corpus: Corpus, sequence_length: int, seed: int | None) -> None:
        self.corpus = corpus
        self.sequence_length = s = sequence_length
        span = max(1, corpus.span // s) if corpus.span else None
        self._starts = np.array([stream.start for stream in corpus.streams])
        self._pattern = blend([stream.weight for stream in corpus.streams])
        self._orders = []
        for i, stream in enumerate(corpus.streams):
            n = (stream.tokens - 1) // s
            if n < 1:
                which = f"source {i}" if len(corpus.streams) > 1 else "a corpus"
                reason = f"{which} of {stream.tokens} tokens has no window of {s} + 1"
                raise ValueError(f"train.sequence_length = {s}: {reason}")
            self._orders.append(Windows(n, None if seed is None else stream_seed(seed, i), span))
        self.windows = sum(order.n for order in self._orders)

    def starts(self, samples: np.ndarray) -> np.ndarray:
        """The token (count) that each sample's (count) window starts with; samples count on from one epoch to the next."""
        streams, numbers = self._pattern.place(np.asarray(samples, np.int64))
        starts = self._starts[streams]
        for stream in np.unique(streams).tolist():
            own = streams == stream
            starts[own] += self._orders[stream].order(numbers[own]) * self.sequence_length
        return starts

    def batch(self, first: int, count: int) -> np.ndarray:
        """Tokens (count, sequence length + 1), int64, of the samples [first, first + count)."""
        self._stage(first)
        s = self.sequence_length
        starts = self.starts(np.arange(first, first + count)).tolist()
        return np.stack([self.corpus.read(start, s + 1) for start in starts])  # (count, s + 1)

    def documents(self, first: int, count: int) -> np.ndarray:
        """Where the document of each token (count, sequence length) begins, as its place in the sample, int64."""
        s = self.sequence_length
        starts = self.starts(np.arange(first, first + count)).tolist()
        return np.stack([self.corpus.documents(start, s) for start in starts])  # (count, s)

    def _stage(self, first: int) -> None:
        """Have the shards staged that samples from `first` on need next, span by span."""
        if self.corpus.stage is None:
            return
        s = self.sequence_length
        streams, numbers = self._pattern.place(np.arange(first, first + len(self._pattern.stream)))
        for stream, at in zip(*np.unique(streams, return_index=True), strict=True):
            for window, count in self._orders[stream].extents(int(numbers[at]), AHEAD):
                self.corpus.ahead(int(self._starts[stream]) + window * s, count * s + 1)
