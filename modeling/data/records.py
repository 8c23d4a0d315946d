"""Samples made of records, for fine-tuning: packed rows of s tokens, or one sequence a row, and which tokens the loss counts.

A dataset's corpus.json lists the shards, whose documents are the records' sequences; a token that the loss does not count is
stored as its complement, ~id. Beside it, `<split>_rows.npz` says where each row's sequences are:

    starts, lengths   (sequences) in the corpus, in order of rows
    ends              (rows) sequences up to the end of each row
    counted           (rows) tokens of the row that the loss counts

so that a step's number of counted tokens, by which its loss is normalized, is known on every rank without communication.
A sample of preference pairs is two rows: the chosen answers of one pair, or packed of several, and the rejected ones of the
same pairs in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from modeling.data.corpus import Corpus, Samples
from modeling.data.sample_order import WindowOrder
from modeling.data.shard_cache import ShardCache
from profiles.schema import Profile

RECORD_DTYPE = np.dtype("<i4")
REFERENCE = "reference.npz"  # for each split, the log-probability of each sequence's answer, in order of rows
OPEN_SAMPLES = 256  # that a pair is tried in, of those not full
PADDING = -(2**31)  # stored where a row has no token; not the complement of an id


def open_samples(
    profile: Profile,
    folder: str | Path,
    split: str,
    cache: ShardCache | None = None,
    *,
    reference: Path | None = None,
    ordered: bool = False,
) -> Samples | RecordSamples:
    """The samples of a dataset artifact's split: in training order for "train", in corpus order for "validation".

    Args:
        reference: folder of the log-probabilities of a reference model.
        ordered: read "train" in corpus order too.
    """
    corpus = Corpus.open(folder, split, cache)
    shuffled = split == "train" and not ordered
    s, seed = profile.train.sequence_length, profile.train.seed if shuffled else None
    if profile.objective.kind == "pretrain":
        return Samples(corpus, s, seed, mixture_changes(profile) if shuffled else ())
    shape = profile.rows_per_sample, profile.answers_per_row
    samples = RecordSamples(corpus, rows_path(folder, split), s, seed, *shape)
    if reference is not None:
        with np.load(reference / REFERENCE) as arrays:
            samples.reference = arrays[split]
    return samples


def mixture_changes(profile: Profile) -> list[tuple[int, dict[int, float]]]:
    """First sample, and weight of each training source by its number, of each entry of `data.schedule`."""
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
    """Best-fit decreasing: sequences (lengths) in as few rows of `size` tokens as this heuristic finds.

    A bit set holds the free sizes of open rows, so that each sequence costs one shift and not a search. Raises ValueError for a
    sequence longer than a row.
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
    """Pairs in few samples of two rows of `size` tokens: rows of chosen and of rejected sequences, in turn.

    Best fit in both rows at once, in order, among the OPEN_SAMPLES with the most room: 0.04 ms a pair, and rows at least as full
    as in decreasing order, of which the largest close the samples before what would fill them comes.

    Args:
        lengths: (sequences), chosen and rejected in turn.
    """
    pairs = np.asarray(lengths, np.int64).reshape(-1, 2)
    samples: list[list[int]] = []
    free = np.zeros((0, 2), np.int64)  # tokens of the rows of each open sample
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


def write_rows(
    path: Path, lengths: np.ndarray, counted: np.ndarray, rows: Sequence[Sequence[int]] | None
) -> None:
    """Write the rows of a split.

    Args:
        lengths, counted: (sequences) tokens, and counted tokens, of the corpus's sequences in order.
        rows: the sequences of each row; None: one sequence a row.
    """
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    order = np.concatenate([*map(np.asarray, rows), []]).astype(np.int64) if rows is not None else slice(None)
    sizes = (
        np.ones(len(lengths), np.int64) if rows is None else np.array([len(row) for row in rows], np.int64)
    )
    ends = np.cumsum(sizes)
    totals = np.concatenate(([0], np.cumsum(counted[order], dtype=np.int64)))
    sums = totals[ends] - totals[ends - sizes]
    with path.open("wb") as file:
        np.savez(file, starts=starts[order], lengths=lengths[order], ends=ends, counted=sums)


class RecordSamples:
    """Samples of one or more rows in training order, or in corpus order without a seed (validation).

    Attributes:
        windows: samples in one epoch.
        answers: how many answers a row of pairs may have.
        reference: log-probability of each sequence's answer under a reference model, in order of rows; None if it is not known.

    Raises:
        ValueError: there is none.
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
        with np.load(rows) as arrays:
            self._starts, self._lengths, self._ends, self._counted = (
                arrays[name] for name in ("starts", "lengths", "ends", "counted")
            )
        self.windows = len(self._ends) // rows_per_sample
        self.answers = answers
        if not self.windows:
            raise ValueError(f"{rows} has no samples")
        self._order = WindowOrder(self.windows, seed)
        self.reference: np.ndarray | None = None

    def _rows(self, first: int, count: int) -> np.ndarray:
        """Rows (count · rows per sample) of the samples [first, first + count)."""
        samples = self._order.windows(np.arange(first, first + count))
        return (samples[:, None] * self.rows_per_sample + np.arange(self.rows_per_sample)).flatten()

    def _sequences(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        part = slice(int(self._ends[row - 1]) if row else 0, int(self._ends[row]))
        return self._starts[part], self._lengths[part]

    def sizes(self, first: int, count: int) -> np.ndarray:
        """Number of sequences of each row (rows) of the samples [first, first + count)."""
        rows = self._rows(first, count)
        return self._ends[rows] - np.where(rows > 0, self._ends[rows - 1], 0)

    def counted(self, first: int, count: int) -> int:
        """What the mean loss of these samples is a mean of: the tokens that it counts, or the pairs."""
        if self.rows_per_sample > 1:
            return int(self.sizes(first, count)[:: self.rows_per_sample].sum())
        return int(self._counted[self._rows(first, count)].sum())

    def pairs_per_token(self, first: int, count: int) -> float:
        """Pairs of these samples for each token that follows another in their chosen sequences."""
        rows = self._rows(first, count)[:: self.rows_per_sample].tolist()
        tokens = sum(int((self._sequences(row)[1] - 1).sum()) for row in rows)
        return self.counted(first, count) / max(1, tokens)

    def references(self, first: int, count: int) -> np.ndarray:
        """Log-probabilities (rows, answers) of the rows' answers under the reference model, float32; 0 beyond a row's last."""
        rows, sizes = self._rows(first, count), self.sizes(first, count)
        out = np.zeros((len(rows), self.answers), np.float32)
        for filled, row, size in zip(out, rows.tolist(), sizes.tolist(), strict=True):
            end = int(self._ends[row])
            filled[:size] = self.reference[end - size : end]
        return out

    def answer_numbers(self, first: int, count: int) -> np.ndarray:
        """Number in its row (rows, s) of the sequence to which both a token and the next belong, int64; else -1."""
        rows = self._rows(first, count)
        out = np.full((len(rows), self.sequence_length), -1, np.int64)
        for filled, row in zip(out, rows.tolist(), strict=True):
            position = 0
            for number, length in enumerate(self._sequences(row)[1].tolist()):
                filled[position : position + length - 1] = number
                position += length
        return out

    def batch(self, first: int, count: int) -> np.ndarray:
        """Tokens (rows, s + 1), int64, of the samples [first, first + count): ids, complements of ids, and PADDING."""
        rows = self._rows(first, count)
        out = np.full((len(rows), self.sequence_length + 1), PADDING, np.int64)
        for filled, row in zip(out, rows.tolist(), strict=True):
            position = 0
            for start, length in zip(*self._sequences(row), strict=True):
                filled[position : position + length] = self.corpus.read(int(start), int(length))
                position += length
        return out

    def document_starts(self, first: int, count: int) -> np.ndarray:
        """Position in its row where each token's (rows, s) sequence starts, int64; padding is a sequence of its own."""
        rows = self._rows(first, count)
        out = np.empty((len(rows), self.sequence_length), np.int64)
        for filled, row in zip(out, rows.tolist(), strict=True):
            position = 0
            for length in self._sequences(row)[1].tolist():
                filled[position : position + length] = position
                position += length
            filled[position:] = position
        return out

    def prompt(self, sample: int) -> np.ndarray:
        """Ids of the tokens that a sample's first sequence begins with and the loss does not count."""
        row = int(self._rows(sample, 1)[0])
        start, length = (int(values[0]) for values in self._sequences(row))
        tokens = self.corpus.read(start, length)
        counted = np.flatnonzero(tokens >= 0)
        return ~tokens[: counted[0] if len(counted) else length]
