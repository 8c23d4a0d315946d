"""Training samples: sample i is a pure function of (seed, i), independent of topology and restarts.

The documents of a stream's shards are one sequence of T tokens. Window w of sequence length s is the tokens [w·s, w·s
+ s]: s + 1 of them because each token predicts the next, so neighbours share one. There are n = ⌊(T - 1) / s⌋
windows; the incomplete last one is dropped. All shards are one stream, or one stream per source if sources have
weights; sample_order.py maps samples to windows. No index is built: a corpus of 10^12 tokens in 20,000 shards opens
in a fraction of a second. Resuming needs only the sample counter.
"""

from __future__ import annotations

import copy
import json
import sys
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from modeling.data.indexed import IndexedError, data_path, map_index, map_tokens, read_header
from modeling.data.replay import Replay
from modeling.data.sample_order import MixtureSchedule, WindowOrder, stream_seed
from modeling.data.shard_cache import ShardCache
from profiles.files import state_files

OPEN_SHARDS = 64  # local shards kept mapped; each has two file descriptors, and processes commonly get 1024
PREFETCH_SPANS = 2  # spans whose shards are prefetched: the current one and the next
PREFETCH_BATCHES = 8  # the same in corpus order, which has no spans, in global batches
FORMATS = (1, 2)  # of corpus.json; 2 has `replay`
PROMPT_SAMPLES = 16  # in which the beginning of a document is searched for
HISTORY = -1  # source number of replayed streams, which are not among a round's sources
PARTIAL_SEED = 0  # of the order in which a part of a split is evaluated; the same for all runs


class Stream(NamedTuple):
    """Consecutive tokens of a corpus: share of samples, first token, number of tokens, source number."""

    weight: float
    start: int
    tokens: int
    source: int = 0


@dataclass(frozen=True)
class MappedShard:
    """A memory-mapped shard: the tokens of its split, and the first one's index in its file."""

    tokens: np.ndarray
    start: int
    prefix: Path

    @cached_property
    def documents(self) -> tuple[np.ndarray, np.ndarray]:
        """Byte offsets of its sequences, and the sequence that each document starts with; mapped on first use."""
        index = map_index(self.prefix, read_header(self.prefix))
        return index.pointers, index.document_indices

    def read(self, offset: int, count: int, vocabulary_size: int, lowest: int = 0) -> np.ndarray:
        """A copy of tokens (count). Raises IndexedError if one is outside the vocabulary, or below `lowest`."""
        part = self.tokens[offset : offset + count]
        if part.max() >= vocabulary_size or part.min() < lowest:
            i = int(((part >= vocabulary_size) | (part < lowest)).argmax())
            reason = f"token {part[i]} is not in the vocabulary of {vocabulary_size}"
            raise IndexedError(data_path(self.prefix), (self.start + offset + i) * part.itemsize, reason)
        return part.astype(np.int64)

    def document_starts(self, offset: int, count: int) -> np.ndarray:
        """Positions among tokens (count) from `offset` where documents start, by binary search in the index."""
        size = self.tokens.itemsize
        pointers, indices = self.documents

        def pointer(sequence: int) -> int:
            return int(pointers[sequence]) if sequence < len(pointers) else sys.maxsize

        offset += self.start
        first = bisect_right(indices, offset * size, key=pointer)
        last = bisect_left(indices, (offset + count) * size, lo=first, key=pointer)
        return pointers[indices[first:last]] // size - offset


@dataclass
class Corpus:
    """One split's tokens in many shards, mapped on demand; at most OPEN_SHARDS local ones stay mapped."""

    # of the shards' `.bin`/`.idx`, without suffix; relative to the store's artifacts folder if they are in it
    paths: list[str]
    counts: np.ndarray  # (shards) tokens in each
    starts: np.ndarray  # (shards) index in its file of each shard's first token
    vocabulary_size: int  # exceeds every token id
    artifacts: Path  # the store's artifacts folder, if it is on this machine
    eos: int | None = None  # token id that ends each document; None if documents have none
    # streams that samples are drawn from; by default one with all tokens
    streams: list[Stream] = field(default_factory=list)
    span: int | None = None  # number of tokens shuffled together; None: all of a stream
    cache: ShardCache | None = None  # cache for remote shards; None if all are on this machine
    # the validation split's part of each source, by name
    sources: dict[str, Stream] = field(default_factory=dict)
    replay: Replay | None = None  # whose streams are the last ones
    lowest: int = 0  # lowest valid token; -vocabulary_size if tokens may be complements of ids (records.py)
    _open: OrderedDict[int, MappedShard] = field(default_factory=OrderedDict, repr=False)

    def __post_init__(self) -> None:
        self.ends = np.cumsum(self.counts, dtype=np.int64)
        self.streams = self.streams or [Stream(1.0, 0, self.tokens)]

    @classmethod
    def open(cls, folder: str | Path, split: str, cache: ShardCache | None = None) -> Corpus:
        """The split "train" or "validation" of a dataset artifact.

        Args:
            cache: for shards that are not on this machine; without one, the store's shards are expected beside `folder`.

        Raises:
            FileNotFoundError: the folder has no corpus.json.
            ValueError: corpus.json has another format, or the split is unknown.
        """
        path = Path(folder) / "corpus.json"
        manifest = json.loads(state_files.contents(path))
        if manifest.get("format") not in FORMATS:
            raise ValueError(f"{path}: format {manifest.get('format')!r} is unknown; expected 1 or 2")
        if split not in ("train", "validation"):
            raise ValueError(f'split {split!r} is unknown; expected "train" or "validation"')
        shards = manifest[split]
        counts = np.array([shard["tokens"] for shard in shards], np.int64)
        if cache:
            cache.anonymous |= {shard["path"] for shard in shards if shard.get("anonymous")}
            cache.digests |= {shard["path"]: shard["digest"] for shard in shards if "digest" in shard}
        sources = manifest.get("blend") if split == "train" else None
        streams = _streams(sources, counts) if sources else []
        replay = Replay.from_json(manifest["replay"]) if "replay" in manifest and split == "train" else None
        if replay:
            streams = _with_history(streams, replay, counts)
        # Datasets of earlier versions do not list sources.
        held_out = manifest.get("sources", ()) if split == "validation" else ()
        parts = _streams([{"weight": 1.0, "shards": source["shards"]} for source in held_out], counts)
        return cls(
            [shard["path"] for shard in shards],
            counts,
            np.array([shard.get("start", 0) for shard in shards], np.int64),
            manifest["vocabulary_size"],
            Path(folder).absolute().parent.parent,
            manifest["eos"],
            streams,
            manifest.get("span"),
            cache,
            {source["name"]: part for source, part in zip(held_out, parts, strict=True)},
            replay,
            -manifest["vocabulary_size"] if manifest.get("records") else 0,
        )

    @property
    def tokens(self) -> int:
        return int(self.counts.sum())

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens (count), int64, from position `start`, across shards.

        Raises:
            IndexError: the range ends beyond the corpus.
            IndexedError: a shard does not match corpus.json, or a token is outside the vocabulary.
        """
        out = np.empty(count, np.int64)
        filled = 0
        for i, offset, length in self._shard_ranges(start, count):
            limit = self.vocabulary_size
            read = partial(
                MappedShard.read, offset=offset, count=length, vocabulary_size=limit, lowest=self.lowest
            )
            out[filled : filled + length] = self._with_shard(i, read)
            filled += length
        return out

    def document_starts(self, start: int, count: int) -> np.ndarray:
        """Position relative to `start` where each token's document starts, int64 (count); 0 if before it."""
        out = np.zeros(count, np.int64)
        filled = 0
        for i, offset, length in self._shard_ranges(start, count):
            find = partial(MappedShard.document_starts, offset=offset, count=length)
            positions = filled + self._with_shard(i, find)
            out[filled], out[positions] = filled, positions
            filled += length
        return np.maximum.accumulate(out)

    def prefetch(self, start: int, count: int) -> None:
        """Start downloading the remote shards of these tokens."""
        if self.cache:
            ranges = self._shard_ranges(start, count)
            paths = [self.paths[i] for i, _, _ in ranges]
            self.cache.prefetch(filter(self.cache.is_remote, paths))

    def _shard_ranges(self, start: int, count: int) -> list[tuple[int, int, int]]:
        """The parts of [start, start + count) by shard: shard, offset in its split, number of tokens."""
        if start < 0 or start + count > self.tokens:
            raise IndexError(f"tokens [{start}, {start + count}) of a corpus of {self.tokens}")
        ranges = []
        i = int(np.searchsorted(self.ends, start, side="right"))
        while count:
            offset = start - int(self.ends[i] - self.counts[i])
            length = min(count, int(self.counts[i]) - offset)
            if length:
                ranges.append((i, offset, length))
            start, count, i = start + length, count - length, i + 1
        return ranges

    def _with_shard(self, i: int, read: Callable[[MappedShard], np.ndarray]) -> np.ndarray:
        """Call `read`, which must return a copy, with a shard; a cached one is then unmapped for eviction."""
        if self.cache is not None and self.cache.is_remote(self.paths[i]):
            with self.cache.open(self.paths[i]) as prefix:
                return read(self._map(i, prefix))
        if i not in self._open:
            if len(self._open) >= OPEN_SHARDS:
                self._open.popitem(last=False)
            self._open[i] = self._map(i, self.artifacts / self.paths[i])
        self._open.move_to_end(i)
        return read(self._open[i])

    def _map(self, i: int, prefix: Path) -> MappedShard:
        # Takes constant time, because the store verifies digests.
        tokens = map_tokens(prefix, read_header(prefix).dtype)
        start, count = int(self.starts[i]), int(self.counts[i])
        part = tokens[start : start + count]
        if len(part) != count:
            reason = f"has {len(tokens)} tokens, corpus.json says {start + count}"
            raise IndexedError(data_path(prefix), tokens.nbytes, reason)
        return MappedShard(part, start, prefix)


def _streams(sources: list[dict[str, Any]], counts: np.ndarray) -> list[Stream]:
    """One stream per source with a weight."""
    streams, shard, start = [], 0, 0
    for number, source in enumerate(sources):
        tokens = int(counts[shard : shard + source["shards"]].sum())
        if source["weight"]:
            streams.append(Stream(source["weight"], start, tokens, number))
        shard, start = shard + source["shards"], start + tokens
    return streams


def _with_history(new: list[Stream], replay: Replay, counts: np.ndarray) -> list[Stream]:
    """The streams of new data, one without weights, and of the history, whose shards are the last ones."""
    history = [stream.tokens for stream in replay.streams]
    ends = (int(counts.sum()) - sum(history) + np.cumsum(history)).tolist()
    new = new or [Stream(1.0, 0, ends[0] - history[0])]
    pairs = zip(ends, history, strict=True)
    return new + [Stream(0.0, end - tokens, tokens, HISTORY) for end, tokens in pairs]


class Samples:
    """Windows of a corpus in training order, or in corpus order without a seed (validation).

    Args:
        changes: later phases of the mixture in order, each with its first sample and the weight of each source by number; the
            corpus's weights apply from sample 0 on.
        global_batch: samples that all ranks read between two reads of one rank; None: only those that it reads.

    Attributes:
        windows: windows in one epoch of every stream.

    Raises:
        ValueError: a stream is shorter than one window.
    """

    def __init__(
        self,
        corpus: Corpus,
        sequence_length: int,
        seed: int | None,
        changes: Sequence[tuple[int, Mapping[int, float]]] = (),
        global_batch: int | None = None,
    ) -> None:
        self.corpus = corpus
        self.global_batch = global_batch
        self.sequence_length = s = sequence_length
        span = max(1, corpus.span // s) if corpus.span else None
        self._stream_starts = np.array([stream.start for stream in corpus.streams])
        phases: list[tuple[int, Sequence[float]]] = [(0, [stream.weight for stream in corpus.streams])]
        for first, weights in changes:
            # a phase that begins with sample 0 replaces the corpus's
            phases = [phase for phase in phases if phase[0] < first]
            phases.append((first, [weights.get(stream.source, 0.0) for stream in corpus.streams]))
        seeds = [None if seed is None else stream_seed(seed, i) for i in range(len(corpus.streams))]
        self._begins = np.zeros(len(corpus.streams), np.int64)  # number of each stream's first sample
        if corpus.replay and seed is not None:
            phases, history = [*corpus.replay.phases], corpus.replay.streams
            seeds[-len(history) :] = [stream.seed for stream in history]
            self._begins[-len(history) :] = [stream.begin for stream in history]
        self._mixture = MixtureSchedule(phases)
        self._orders = []
        for stream, own_seed in zip(corpus.streams, seeds, strict=True):
            n = (stream.tokens - 1) // s
            if n < 1:
                name = f"data.sources.{stream.source}" if len(corpus.streams) > 1 else "a corpus"
                reason = f"{name} of {stream.tokens} tokens has no window of {s} + 1"
                raise ValueError(f"train.sequence_length = {s}: {reason}")
            self._orders.append(WindowOrder(n, own_seed, span))
        self.windows = sum(order.n for order in self._orders)

    def by_source(self) -> dict[str, Samples]:
        """The samples of each source separately, by its name; without sources shorter than a window."""
        s = self.sequence_length
        return {
            name: Samples(replace(self.corpus, streams=[stream]), s, None, global_batch=self.global_batch)
            for name, stream in self.corpus.sources.items()
            if stream.tokens > s
        }

    def shuffled(self, batch: int) -> Samples:
        """The samples in a fixed random order, of which the first ones represent the split.

        Without `data.shuffle_tokens`, windows are shuffled; with it, ranges of about `batch` consecutive ones, so that a few
        batches need few remote shards.
        """
        span = batch if self.corpus.span else None
        shuffled = copy.copy(self)
        shuffled._orders = [
            WindowOrder(order.n, stream_seed(PARTIAL_SEED, i), span) for i, order in enumerate(self._orders)
        ]
        return shuffled

    def window_starts(self, samples: np.ndarray) -> np.ndarray:
        """First token (count) of the window of each sample (count); sample numbers continue across epochs."""
        streams, numbers = self._locate(np.asarray(samples, np.int64))
        starts = self._stream_starts[streams]
        for stream in np.unique(streams).tolist():
            mask = streams == stream
            starts[mask] += self._orders[stream].windows(numbers[mask]) * self.sequence_length
        return starts

    def _locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Stream (count) of each sample (count), and its number (count) in the stream's order."""
        streams, numbers = self._mixture.locate(samples)
        return streams, numbers + self._begins[streams]

    def batch(self, first: int, count: int) -> np.ndarray:
        """Tokens (count, s + 1), int64, of the samples [first, first + count)."""
        self._prefetch(first, count)
        s = self.sequence_length
        starts = self.window_starts(np.arange(first, first + count)).tolist()
        return np.stack([self.corpus.read(start, s + 1) for start in starts])  # (count, s + 1)

    def count_targets(self, first: int, count: int) -> int:
        """Number of tokens of the samples [first, first + count) that the loss counts, which is all."""
        return count * self.sequence_length

    def prompt(self, sample: int) -> np.ndarray:
        """Token ids of the prompt for a generated text, which begins with a document.

        The document begins in the first half of this sample or of one of the next; if none does, the prompt is this sample.
        """
        half = np.arange(self.sequence_length // 2)
        for number in range(sample, sample + PROMPT_SAMPLES):
            starts = self.document_starts(number, 1)[0, : len(half)]  # (s/2)
            begins = np.flatnonzero(starts == half)[1:]  # where a sample begins, a document may not
            if len(begins):
                return self.batch(number, 1)[0, begins[0] :]
        return self.batch(sample, 1)[0]

    def document_starts(self, first: int, count: int) -> np.ndarray:
        """Position (count, s) in its sample where each token's document starts, int64."""
        s = self.sequence_length
        starts = self.window_starts(np.arange(first, first + count)).tolist()
        return np.stack([self.corpus.document_starts(start, s) for start in starts])  # (count, s)

    def _prefetch(self, first: int, count: int) -> None:
        """Prefetch the shards needed by a batch and by the samples after it, span by span."""
        if self.corpus.cache is None:
            return
        s, ahead = self.sequence_length, PREFETCH_BATCHES * (self.global_batch or count)
        samples = np.arange(first, first + self._mixture.period)
        if self.corpus.replay:  # whose phases may have long patterns, and whose streams are mostly not read
            samples = samples[:ahead]
        streams, numbers = self._locate(samples)
        for stream, at in zip(*np.unique(streams, return_index=True), strict=True):
            if self.corpus.streams[stream].source == HISTORY:
                for window in self._orders[stream].windows(numbers[streams == stream]).tolist():
                    self.corpus.prefetch(int(self._stream_starts[stream]) + window * s, s + 1)
                continue
            for window, windows in self._orders[stream].spans_from(int(numbers[at]), PREFETCH_SPANS, ahead):
                self.corpus.prefetch(int(self._stream_starts[stream]) + window * s, windows * s + 1)
