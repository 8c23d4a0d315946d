"""Sample order: the stream and window that sample i reads, a stateless pure function of (seed, i).

A stream of n windows is visited in the order of a permutation of [0, n): a Feistel network (Luby and Rackoff 1988)
over the next power of four, keyed by seed and epoch, reapplied while the result is out of range (cycle walking, under
four times on average). With span shuffling, the spans are permuted, and the windows within each.

Streams with weights w alternate in a fixed pattern of P samples, P the least common denominator of w: the samples of
stream j sort by (m + ½) / w_j, m = 0, 1, ... After N samples stream j has had w_j·N of them to within about one
sample per stream, and exactly w_j·N after every P samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

ROUNDS = 6
# In samples; weights with a larger common denominator are rounded to multiples of its inverse.
MAX_PATTERN_LENGTH = 1 << 20
GOLDEN = 0x9E3779B97F4A7C15


class Pattern(NamedTuple):
    """How streams alternate, repeated every P samples."""

    stream: np.ndarray  # (P) stream of each sample
    rank: np.ndarray  # (P) number of earlier samples of the same stream in the pattern
    quotas: np.ndarray  # (streams) samples of each stream in the pattern

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Stream (count) of each sample (count) of a run, and its number (count) among that stream's samples."""
        repeats, offsets = np.divmod(samples, len(self.stream))
        stream = self.stream[offsets]
        return stream, repeats * self.quotas[stream] + self.rank[offsets]

    def drawn(self, samples: int) -> np.ndarray:
        """Number (streams) of each stream's samples among the first ones of a run."""
        repeats, rest = divmod(samples, len(self.stream))
        return repeats * self.quotas + np.bincount(self.stream[:rest], minlength=len(self.quotas))


def quotas(weights: Sequence[float | Fraction]) -> list[int]:
    """Samples of each stream in the pattern for these weights; 0 for a weight too small to be drawn."""
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    length = min(math.lcm(*(share.denominator for share in shares)), MAX_PATTERN_LENGTH)
    result = [math.floor(share * length) for share in shares]
    # Largest remainder method: distribute what rounding down left over.
    by_remainder = sorted(range(len(shares)), key=lambda i: result[i] - shares[i] * length)
    for i in by_remainder[: length - sum(result)]:
        result[i] += 1
    return result


def blend(weights: Sequence[float]) -> Pattern:
    """The pattern for weights of any sum. Raises ValueError if a stream would never be drawn."""
    counts = quotas(weights)
    if 0 in counts:
        reason = f"less than one of {MAX_PATTERN_LENGTH:,} samples: weights {[*weights]}"
        raise ValueError(f"stream {counts.index(0)} has {reason}")
    times = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
    streams = np.repeat(np.arange(len(counts)), counts)
    ranks = np.concatenate([np.arange(count) for count in counts])
    order = np.argsort(times, kind="stable")
    return Pattern(streams[order], ranks[order], np.array(counts))


class MixtureSchedule:
    """The stream of each sample when weights change at given samples; a pure function of its number.

    Every phase has its own pattern, and each stream continues where the previous phase left it, so that no window is repeated
    before its stream has been read to the end.

    Args:
        phases: first sample of each phase, and the weight of each stream; the first phase begins at sample 0. A stream with
            weight 0 is not drawn in that phase.

    Raises:
        ValueError: a stream with a weight would never be drawn.
    """

    def __init__(self, phases: Sequence[tuple[int, Sequence[float]]]) -> None:
        self._firsts = np.array([first for first, _ in phases], np.int64)
        self._patterns = [pattern_of(weights) for _, weights in phases]
        begun = np.zeros(len(phases[0][1]), np.int64)  # samples of each stream before the phase
        self._begun = [begun]
        for pattern, length in zip(self._patterns, np.diff(self._firsts).tolist(), strict=False):
            self._begun.append(self._begun[-1] + pattern.drawn(length))

    @property
    def period(self) -> int:
        """Number of samples within which every stream of a phase is drawn."""
        return max(len(pattern.stream) for pattern in self._patterns)

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Stream (count) of each sample (count) of a run, and its number (count) among that stream's samples."""
        phases = np.searchsorted(self._firsts, samples, side="right") - 1
        streams, numbers = np.empty_like(samples), np.empty_like(samples)
        for phase in np.unique(phases).tolist():
            mask = phases == phase
            stream, number = self._patterns[phase].locate(samples[mask] - self._firsts[phase])
            streams[mask], numbers[mask] = stream, self._begun[phase][stream] + number
        return streams, numbers


def pattern_of(weights: Sequence[float]) -> Pattern:
    """The pattern of the streams with a nonzero weight, which keep their numbers."""
    drawn = [stream for stream, weight in enumerate(weights) if weight]
    pattern = blend([weights[stream] for stream in drawn])
    counts = np.zeros(len(weights), np.int64)
    counts[drawn] = pattern.quotas
    return Pattern(np.array(drawn)[pattern.stream], pattern.rank, counts)


class WindowOrder:
    """The order in which one stream's n windows are read, epoch after epoch.

    Args:
        n: number of windows.
        seed: seed of the shuffle; None keeps corpus order.
        span: number of windows shuffled together; None: all.
    """

    def __init__(self, n: int, seed: int | None, span: int | None = None) -> None:
        self.n, self.seed = n, seed
        self.spans = 1 if span is None else max(1, -(-n // span))
        self._size, self._longer = divmod(n, self.spans)  # the first `_longer` spans have one window more

    def windows(self, numbers: np.ndarray) -> np.ndarray:
        """The window (count) that each of the stream's samples (count) reads; numbers continue across epochs."""
        epochs, positions = np.divmod(np.asarray(numbers, np.int64), self.n)
        if self.seed is None:
            return positions
        if self.spans == 1:
            return permute(positions, self.n, self.seed, epochs)
        windows = np.empty_like(positions)
        for epoch in np.unique(epochs).tolist():
            spans, ends = self._span_order(epoch)
            slots = np.searchsorted(ends, positions, side="right")
            for slot in np.unique(slots[epochs == epoch]).tolist():
                mask = (epochs == epoch) & (slots == slot)
                first, size = self._extent(int(spans[slot]))
                start = int(ends[slot]) - size
                key = np.array(epoch * self.spans + int(spans[slot]))
                windows[mask] = first + permute(positions[mask] - start, size, self.seed + 1, key)
        return windows

    def spans_from(self, number: int, count: int, ahead: int) -> list[tuple[int, int]]:
        """(first window, windows) of a sample's span and of the spans read after it, `count` in all.

        In corpus order, which has no spans, these are the next `ahead` windows.
        """
        epoch, position = divmod(number, self.n)
        if self.seed is None:
            return [(position, min(ahead, self.n - position))]
        if self.spans == 1:
            return [(0, self.n)]
        spans, ends = self._span_order(epoch)
        slot = int(np.searchsorted(ends, position, side="right"))
        upcoming = spans[slot : slot + count].tolist()
        if len(upcoming) < count:
            upcoming += self._span_order(epoch + 1)[0][: count - len(upcoming)].tolist()
        return [self._extent(span) for span in upcoming]

    def _extent(self, span: int) -> tuple[int, int]:
        """First window and number of windows of a span."""
        return span * self._size + min(span, self._longer), self._size + (span < self._longer)

    def _span_order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The spans in an epoch's order, and the position after the last window of each."""
        assert self.seed is not None
        spans = permute(np.arange(self.spans), self.spans, self.seed, np.array(epoch))
        return spans, np.cumsum(self._size + (spans < self._longer))


def sample_number(position: int, excluded: Sequence[tuple[int, int]]) -> int:
    """Sample at a position of the stream without the ranges [start, end), which may overlap."""
    covered = 0  # end of the ranges so far
    for start, end in sorted(excluded):
        start = max(start, covered)
        if start < end and position >= start:
            position += end - start
        covered = max(covered, end)
    return position


def stream_seed(seed: int, stream: int) -> int:
    """The shuffle seed of one stream of a blend."""
    return (seed + stream * GOLDEN) % 2**64


def permute(values: np.ndarray, n: int, seed: int, epochs: np.ndarray) -> np.ndarray:
    """Apply a permutation of [0, n), keyed by the seed and each value's epoch, to values (count)."""
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
    """splitmix64's finalizer: a bijection of 64-bit words; every input bit affects every output bit."""
    x = x + np.uint64(GOLDEN)
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)
