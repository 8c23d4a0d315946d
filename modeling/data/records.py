"""Samples made of records, for fine-tuning: rows of one sequence, or of several packed into s tokens.

A dataset's corpus.json lists the shards, whose documents are the records' sequences; a token that the loss does not count is
stored as its complement, ~id. Beside it, `<split>_rows.npz` locates the sequences of each row:

    starts, lengths   (sequences) in the corpus, in order of rows
    ends              (rows) number of sequences up to the end of each row
    counted           (rows) number of tokens of each row that the loss counts

Thus every rank knows a step's number of counted tokens, which normalizes its loss, without communication. A sample of preference
pairs is two rows: the chosen answers of one pair, or of several if packed, and the rejected answers of the same pairs in the same
order.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Self

import numpy as np

from modeling.data.corpus import PARTIAL_SEED, Corpus, Samples
from modeling.data.replay import Replay
from modeling.data.sample_order import MixtureSchedule, WindowOrder
from modeling.data.shard_cache import ShardCache
from profiles.schema import Profile

RECORD_DTYPE = np.dtype("<i4")
REFERENCE = "reference.npz"  # for each split, the log-probability of each sequence's answer, in order of rows
OPEN_SAMPLES = 256  # number of unfilled samples that are candidates for a pair
PADDING = -(2**31)  # marks positions of a row without a token; not the complement of an id


def open_samples(
    profile: Profile,
    folder: str | Path,
    split: str,
    cache: ShardCache | None = None,
    *,
    reference: Path | None = None,
    ordered: bool = False,
) -> Samples | RecordSamples:
    """Samples of a dataset artifact's split: "train" in training order, "validation" in corpus order.

    Args:
        reference: folder with the log-probabilities of the reference model.
        ordered: read "train" in corpus order too.
    """
    corpus = Corpus.open(folder, split, cache)
    shuffled = split == "train" and not ordered
    s, seed = profile.train.sequence_length, profile.train.seed if shuffled else None
    if not profile.objective.traits.reads_records:
        changes = mixture_changes(profile) if shuffled else ()
        return Samples(corpus, s, seed, changes, profile.train.global_batch_size)
    shape = profile.rows_per_sample, profile.answers_per_row
    samples = RecordSamples(corpus, rows_path(folder, split), s, seed, *shape)
    if reference is not None:
        with np.load(reference / REFERENCE) as arrays:
            samples.reference = arrays[split]
    return samples


def mixture_changes(profile: Profile) -> list[tuple[int, dict[int, float]]]:
    """First sample of each entry of `data.schedule`, and the weight of each training source by its number."""
    sources = [i for i, source in enumerate(profile.data.sources) if source.use != "validation"]
    batch = profile.train.global_batch_size
    return [
        ((change.step - 1) * batch, dict(zip(sources, change.weights, strict=True)))
        for change in profile.data.schedule
    ]


def rows_path(folder: str | Path, split: str) -> Path:
    """File with the rows of a split."""
    return Path(folder) / f"{split}_rows.npz"


def pack_rows(lengths: np.ndarray, size: int) -> list[list[int]]:
    """Pack sequences (lengths) into few rows of `size` tokens: best fit in order of decreasing length.

    A bit set holds the free sizes of open rows, so that finding the best row takes one shift. Raises ValueError for a sequence
    longer than a row.
    """
    rows: list[list[int]] = []
    open_rows: list[list[int]] = [[] for _ in range(size + 1)]  # by free tokens
    free_sizes = 0  # bit f: some row has f free tokens
    for i in np.argsort(-np.asarray(lengths, np.int64), kind="stable").tolist():
        length = int(lengths[i])
        if length > size:
            raise ValueError(f"sequence {i} has {length} tokens, a row {size}")
        fitting = free_sizes >> length
        if fitting:
            free = length + (fitting & -fitting).bit_length() - 1
            row = open_rows[free].pop()
            if not open_rows[free]:
                free_sizes ^= 1 << free
        else:
            free, row = size, len(rows)
            rows.append([])
        rows[row].append(i)
        if left := free - length:
            open_rows[left].append(row)
            free_sizes |= 1 << left
    return rows


def pack_pairs(lengths: np.ndarray, size: int) -> list[list[int]]:
    """Pack pairs into few samples of two `size`-token rows, alternately of chosen and rejected sequences.

    Best fit in both rows at once, in the given order, among the OPEN_SAMPLES with the most room: 0.04 ms per pair. Decreasing
    length, as in `pack_rows`, fills rows no better: the largest pairs close samples before the pairs that would fill them come.

    Args:
        lengths: (sequences), alternately of chosen and rejected ones.
    """
    pairs = np.asarray(lengths, np.int64).reshape(-1, 2)
    samples: list[list[int]] = []
    free = np.zeros((0, 2), np.int64)  # free tokens in both rows of each open sample
    numbers = np.zeros(0, np.int64)  # of the open samples
    for pair in range(len(pairs)):
        if pairs[pair].max() > size:
            raise ValueError(f"pair {pair} has a sequence of {pairs[pair].max()} tokens, a row {size}")
        left = free - pairs[pair]
        fitting = (left >= 0).all(1)
        if fitting.any():
            best = int(np.where(fitting, left.sum(1), 2 * size).argmin())
        else:
            if len(free) == OPEN_SAMPLES:
                kept = np.arange(len(free)) != free.sum(1).argmin()
                free, numbers = free[kept], numbers[kept]
            free = np.concatenate((free, [[size, size]]))
            numbers, best = np.append(numbers, len(samples)), len(free) - 1
            samples.append([])
        free[best] -= pairs[pair]
        samples[numbers[best]].append(pair)
    return [[2 * pair + side for pair in sample] for sample in samples for side in (0, 1)]


@dataclass(frozen=True)
class Rows:
    """Rows of a corpus, or of a part of it, with the arrays of their file."""

    starts: np.ndarray
    lengths: np.ndarray
    ends: np.ndarray
    counted: np.ndarray

    @classmethod
    def of(cls, lengths: np.ndarray, counted: np.ndarray, rows: Sequence[Sequence[int]] | None) -> Self:
        """The rows that a corpus's sequences are packed into.

        Args:
            lengths, counted: (sequences) tokens, and counted tokens, of the corpus's sequences in order.
            rows: the sequences of each row; None: one sequence per row.
        """
        starts = np.cumsum(lengths, dtype=np.int64) - lengths
        if rows is None:
            order, sizes = np.arange(len(lengths)), np.ones(len(lengths), np.int64)
        else:
            order = np.fromiter(chain.from_iterable(rows), np.int64)
            sizes = np.fromiter(map(len, rows), np.int64)
        ends = np.cumsum(sizes)
        totals = np.concatenate(([0], np.cumsum(counted[order], dtype=np.int64)))
        return cls(starts[order], lengths[order], ends, totals[ends] - totals[ends - sizes])

    @classmethod
    def read(cls, path: Path) -> Self:
        with np.load(path) as arrays:
            return cls(**{field.name: arrays[field.name] for field in fields(cls)})

    def write(self, path: Path) -> None:
        with path.open("wb") as file:
            np.savez(file, **{field.name: getattr(self, field.name) for field in fields(self)})

    def __len__(self) -> int:
        return len(self.ends)

    def part(self, first: int, last: int, start: int) -> Self:
        """The rows [first, last), whose part of the corpus begins with the token `start`."""
        begin, end = (int(self.ends[row - 1]) if row else 0 for row in (first, last))
        starts, lengths = self.starts[begin:end] - start, self.lengths[begin:end]
        return type(self)(starts, lengths, self.ends[first:last] - begin, self.counted[first:last])

    @classmethod
    def joined(cls, parts: Sequence[tuple[Rows, int]]) -> Self:
        """The rows of consecutive parts of a corpus, each given with its number of tokens."""
        tokens = np.cumsum([0, *(count for _, count in parts)])[:-1].tolist()
        sequences = np.cumsum([0, *(len(rows.starts) for rows, _ in parts)])[:-1].tolist()
        return cls(
            np.concatenate([rows.starts + first for (rows, _), first in zip(parts, tokens, strict=True)]),
            np.concatenate([rows.lengths for rows, _ in parts]),
            np.concatenate([rows.ends + first for (rows, _), first in zip(parts, sequences, strict=True)]),
            np.concatenate([rows.counted for rows, _ in parts]),
        )


class RecordSamples:
    """Samples of one or more rows in training order, or in corpus order without a seed (validation).

    Attributes:
        windows: samples in one epoch.
        answers: maximum number of answers in a row of pairs.
        reference: log-probability of each sequence's answer under the reference model, in order of rows; None if unknown.

    Raises:
        ValueError: the split has no samples.
    """

    def __init__(
        self,
        corpus: Corpus,
        rows: Path,
        sequence_length: int,
        seed: int | None,
        rows_per_sample: int = 1,
        answers: int = 1,
    ) -> None:
        self.corpus, self.sequence_length, self.rows_per_sample = corpus, sequence_length, rows_per_sample
        found = Rows.read(rows)
        self._starts, self._lengths = found.starts, found.lengths
        self._ends, self._counted = found.ends, found.counted
        self.windows = len(self._ends) // rows_per_sample
        self.answers = answers
        if not self.windows:
            raise ValueError(f"{rows} has no samples")
        self._order: WindowOrder | _ReplayOrder = WindowOrder(self.windows, seed)
        if corpus.replay is not None and seed is not None:
            self._order = _ReplayOrder(corpus.replay, self.windows, seed)
        self._numbers: np.ndarray | None = None  # (windows) of the samples, if they are a part of the split
        self.reference: np.ndarray | None = None

    def by_source(self) -> dict[str, RecordSamples]:
        """The samples of each source separately, by its name; without sources that have none.

        A sample that packs several sequences belongs to the source of its first one.
        """
        firsts = self._starts[np.concatenate(([0], self._ends[:-1]))][:: self.rows_per_sample]
        found = {}
        for name, stream in self.corpus.sources.items():
            inside = (firsts >= stream.start) & (firsts < stream.start + stream.tokens)
            if inside.any():
                found[name] = part = copy.copy(self)
                part._numbers, part.windows = np.flatnonzero(inside), int(inside.sum())
                part._order = WindowOrder(part.windows, None)
        return found

    def shuffled(self, batch: int) -> RecordSamples:
        """The samples in a fixed random order, of which the first ones represent the split.

        Args:
            batch: as of `Samples.shuffled`; packed rows read from all shards in any order.
        """
        shuffled = copy.copy(self)
        shuffled._order = WindowOrder(self.windows, PARTIAL_SEED)
        return shuffled

    def _rows(self, first: int, count: int) -> np.ndarray:
        """Rows (count · rows per sample) of the samples [first, first + count)."""
        samples = self._order.windows(np.arange(first, first + count))
        if self._numbers is not None:
            samples = self._numbers[samples]
        return (samples[:, None] * self.rows_per_sample + np.arange(self.rows_per_sample)).flatten()

    def _sequences(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """First token in the corpus and number of tokens of each sequence (sequences) of a row."""
        part = slice(int(self._ends[row - 1]) if row else 0, int(self._ends[row]))
        return self._starts[part], self._lengths[part]

    def _spans(self, row: int) -> Iterator[tuple[int, int, int]]:
        """(first token in the corpus, position in the row, end position) of each sequence of a row."""
        position = 0
        for start, length in zip(*map(np.ndarray.tolist, self._sequences(row)), strict=True):
            yield start, position, position + length
            position += length

    def sizes(self, first: int, count: int) -> np.ndarray:
        """Number of sequences of each row (rows) of the samples [first, first + count)."""
        rows = self._rows(first, count)
        return self._ends[rows] - np.where(rows > 0, self._ends[rows - 1], 0)

    def count_targets(self, first: int, count: int) -> int:
        """Number of tokens, or pairs, over which the loss of these samples is averaged."""
        if self.rows_per_sample > 1:
            return int(self.sizes(first, count)[:: self.rows_per_sample].sum())
        return int(self._counted[self._rows(first, count)].sum())

    def pairs_per_token(self, first: int, count: int) -> float:
        """Pairs of these samples per target token of their chosen sequences."""
        rows = self._rows(first, count)[:: self.rows_per_sample].tolist()
        tokens = sum(int((self._sequences(row)[1] - 1).sum()) for row in rows)
        return self.count_targets(first, count) / max(1, tokens)

    def references(self, first: int, count: int) -> np.ndarray:
        """The reference model's log-probabilities of answers, float32 (rows, answers); 0 beyond a row's last."""
        assert self.reference is not None
        rows, sizes = self._rows(first, count), self.sizes(first, count)
        out = np.zeros((len(rows), self.answers), np.float32)
        for filled, row, size in zip(out, rows.tolist(), sizes.tolist(), strict=True):
            end = int(self._ends[row])
            filled[:size] = self.reference[end - size : end]
        return out

    def answer_numbers(self, first: int, count: int) -> np.ndarray:
        """Index in its row of the sequence with both a token and its successor, int64 (rows, s); else -1."""
        rows = self._rows(first, count)
        out = np.full((len(rows), self.sequence_length), -1, np.int64)
        for filled, row in zip(out, rows.tolist(), strict=True):
            for number, (_, position, end) in enumerate(self._spans(row)):
                filled[position : end - 1] = number
        return out

    def batch(self, first: int, count: int) -> np.ndarray:
        """Tokens (rows, s + 1) of samples [first, first + count), int64: ids, complements of ids, PADDING."""
        rows = self._rows(first, count)
        out = np.full((len(rows), self.sequence_length + 1), PADDING, np.int64)
        for filled, row in zip(out, rows.tolist(), strict=True):
            for start, position, end in self._spans(row):
                filled[position:end] = self.corpus.read(start, end - position)
        return out

    def document_starts(self, first: int, count: int) -> np.ndarray:
        """Row position where each token's sequence starts, int64 (rows, s); padding is a separate sequence."""
        rows = self._rows(first, count)
        out = np.empty((len(rows), self.sequence_length), np.int64)
        for filled, row in zip(out, rows.tolist(), strict=True):
            for _, position, end in self._spans(row):
                filled[position:end], filled[end:] = position, end
        return out

    def prompt(self, sample: int) -> np.ndarray:
        """Ids of the leading tokens of a sample's first sequence, which the loss does not count."""
        row = int(self._rows(sample, 1)[0])
        start, length = (int(values[0]) for values in self._sequences(row))
        tokens = self.corpus.read(start, length)
        counted = np.flatnonzero(tokens >= 0)
        return ~tokens[: counted[0] if len(counted) else length]


class _ReplayOrder:
    """The order of a round's samples: new ones and those of the history, whose rows are the last ones."""

    def __init__(self, replay: Replay, windows: int, seed: int) -> None:
        history = replay.streams
        replayed = [stream.windows for stream in history]
        counts = [windows - sum(replayed), *replayed]
        seeds = [seed, *(stream.seed for stream in history)]
        self._mixture = MixtureSchedule(replay.phases)
        # number of each stream's first sample
        self._begins = np.array([0, *(stream.begin for stream in history)])
        self._firsts = np.cumsum([0, *counts])[:-1]  # sample of each stream in the corpus
        self._orders = [WindowOrder(count, own) for count, own in zip(counts, seeds, strict=True)]

    def windows(self, numbers: np.ndarray) -> np.ndarray:
        """The sample (count) in the corpus that each of the round's samples (count) is."""
        streams, numbers = self._mixture.locate(np.asarray(numbers, np.int64))
        numbers = numbers + self._begins[streams]
        found = self._firsts[streams]
        for stream in np.unique(streams).tolist():
            mask = streams == stream
            found[mask] += self._orders[stream].windows(numbers[mask])
        return found
