"""Which window of which stream sample i of a run reads: a pure function of (seed, i), computed and not stored.

A stream of n windows is visited in the order of a permutation of [0, n): a Feistel network (Luby and Rackoff 1988) over the next
power of four, keyed by seed and epoch, applied again while the result falls outside (cycle walking, under four times on
average). Where a stream is shuffled in spans, the spans are permuted, and the windows within each.

Streams with weights w alternate in a fixed pattern of P samples, P the least common denominator of w: sample (m + ½) / w_j of
stream j comes in the order of that number. After any N samples stream j has had w_j N of them, but for less than one a
stream; after every P samples, exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

ROUNDS = 6
LONGEST_PATTERN = 1 << 20  # samples; weights are rounded to its inverse where their denominator is larger
GOLDEN = 0x9E3779B97F4A7C15


class Pattern(NamedTuple):
    """How streams alternate, over and over.

    Attributes:
        stream: (P) of each sample.
        rank: (P) how many samples before it are of the same stream.
        quotas: (streams) samples of each.
    """

    stream: np.ndarray
    rank: np.ndarray
    quotas: np.ndarray

    def place(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The stream (count) of each sample (count) of a run, and its number (count) among the samples of that stream."""
        rounds, at = np.divmod(samples, len(self.stream))
        stream = self.stream[at]
        return stream, rounds * self.quotas[stream] + self.rank[at]


def quotas(weights: Sequence[float]) -> list[int]:
    """How many samples of a pattern each stream has, of streams with these weights; 0 where one weighs too little."""
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    length = min(math.lcm(*(share.denominator for share in shares)), LONGEST_PATTERN)
    found = [math.floor(share * length) for share in shares]
    # The largest remainders get what rounding has left.
    by_rest = sorted(range(len(shares)), key=lambda i: found[i] - shares[i] * length)
    for i in by_rest[: length - sum(found)]:
        found[i] += 1
    return found


def blend(weights: Sequence[float]) -> Pattern:
    """The pattern of streams with these weights, which need not sum to 1.

    Raises:
        ValueError: one of so small a share that it would never be read.
    """
    each = quotas(weights)
    if 0 in each:
        raise ValueError(
            f"stream {each.index(0)} has less than one of {LONGEST_PATTERN:,} samples: weights {[*weights]}"
        )
    times = np.concatenate([(np.arange(quota) + 0.5) / quota for quota in each])
    streams = np.repeat(np.arange(len(each)), each)
    ranks = np.concatenate([np.arange(quota) for quota in each])
    order = np.argsort(times, kind="stable")
    return Pattern(streams[order], ranks[order], np.array(each))


class Windows:
    """The order of one stream's n windows, epoch after epoch.

    Args:
        n: windows.
        seed: of the order; None leaves them in their own.
        span: windows that are shuffled together; None: all.
    """

    def __init__(self, n: int, seed: int | None, span: int | None = None) -> None:
        self.n, self.seed = n, seed
        self.spans = 1 if span is None else max(1, -(-n // span))
        self._size, self._larger = divmod(n, self.spans)  # the first so many spans have one window more

    def order(self, numbers: np.ndarray) -> np.ndarray:
        """The window (count) that each number (count) of the stream's samples reads; numbers count on through epochs."""
        epochs, positions = np.divmod(np.asarray(numbers, np.int64), self.n)
        if self.seed is None:
            return positions
        if self.spans == 1:
            return permute(positions, self.n, self.seed, epochs)
        windows = np.empty_like(positions)
        for epoch in np.unique(epochs).tolist():
            spans, ends = self._visits(epoch)
            slots = np.searchsorted(ends, positions, side="right")
            for slot in np.unique(slots[epochs == epoch]).tolist():
                own = (epochs == epoch) & (slots == slot)
                first, size = self._extent(int(spans[slot]))
                begun = int(ends[slot]) - size
                keyed = epoch * self.spans + int(spans[slot])
                windows[own] = first + permute(positions[own] - begun, size, self.seed + 1, np.array(keyed))
        return windows

    def extents(self, number: int, count: int) -> list[tuple[int, int]]:
        """First window and windows of the span that a sample's number falls into, and of the next ones, `count` in all."""
        epoch, position = divmod(number, self.n)
        if self.seed is None or self.spans == 1:
            return [(0, self.n)]
        spans, ends = self._visits(epoch)
        slot = int(np.searchsorted(ends, position, side="right"))
        visited = [*spans[slot : slot + count].tolist()]
        if len(visited) < count:
            visited += self._visits(epoch + 1)[0][: count - len(visited)].tolist()
        return [self._extent(span) for span in visited]

    def _extent(self, span: int) -> tuple[int, int]:
        return span * self._size + min(span, self._larger), self._size + (span < self._larger)

    def _visits(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The spans in the order of an epoch, and the position after the last window of each."""
        spans = permute(np.arange(self.spans), self.spans, self.seed, np.array(epoch))
        return spans, np.cumsum(self._size + (spans < self._larger))


def stream_seed(seed: int, stream: int) -> int:
    """Of one stream of a blend."""
    return (seed + stream * GOLDEN) % 2**64


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
    x = x + np.uint64(GOLDEN)
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)
