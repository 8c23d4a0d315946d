"""Replay: earlier data mixed into the samples of a continual round, each window at most once per pass.

The history is a number of streams: one for each run that the promoted model descends from, or for each of its weighted sources.
A stream keeps its order (its seed) for ever, and each round continues where the one before stopped: the numbers [begin, end) of
its windows are left in the current pass over the history. A pass ends once every stream has been read to its end.

`plan` divides a round's samples into phases, whose weights make each stream's share that of its windows left. A phase ends before
any stream would be read beyond its end; the next one divides what is left. So a pass is exact, however weights are rounded.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple, Self

import numpy as np

from modeling.data.sample_order import Pattern, pattern_of, quotas


@dataclass(frozen=True)
class HistoryStream:
    """Earlier data in one fixed order, and how much of it has been replayed."""

    identity: str  # of the run that was trained on it first
    run: str
    source: str  # its name; empty if the run's sources form one stream
    weight: float | None  # of the source in that run; None: in proportion to its windows
    shards: int
    tokens: int
    windows: int
    seed: int
    begin: int = 0  # number of the next window to replay; numbers continue across passes
    end: int = 0  # number at which the current pass ends

    @property
    def left(self) -> int:
        """Windows that the current pass has not replayed yet."""
        return self.end - self.begin


class Phase(NamedTuple):
    """First sample of a phase, and the weight of each stream, new data first."""

    first: int
    weights: tuple[int, ...]


@dataclass(frozen=True)
class Replay:
    """The replayed part of a round's dataset, as in its corpus.json."""

    share: float  # of the round's tokens
    samples: int  # of the round, for which the phases were planned
    streams: tuple[HistoryStream, ...]
    phases: tuple[Phase, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"phases": [[phase.first, list(phase.weights)] for phase in self.phases]}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        streams = tuple(HistoryStream(**stream) for stream in value["streams"])
        phases = tuple(Phase(first, tuple(weights)) for first, weights in value["phases"])
        return cls(value["share"], value["samples"], streams, phases)

    def counts(self, samples: int) -> list[int]:
        """Windows of each history stream among the first samples of the round."""
        total = np.zeros(len(self.phases[0].weights), np.int64)
        ends = [phase.first for phase in self.phases[1:]] + [max(samples, self.phases[-1].first)]
        for phase, end in zip(self.phases, ends, strict=True):
            if phase.first < samples:
                total += pattern_of(phase.weights).drawn(min(end, samples) - phase.first)
        return total[-len(self.streams) :].tolist()

    def after(self, samples: int) -> tuple[HistoryStream, ...]:
        """The streams once the round has read this many samples."""
        pairs = zip(self.streams, self.counts(samples), strict=True)
        return _continued([replace(stream, begin=stream.begin + count) for stream, count in pairs])


def plan(new: Sequence[float], history: Sequence[HistoryStream], share: float, samples: int) -> Replay:
    """Divide a round's samples among new data and history.

    Args:
        new: weights of the streams of new data.
        history: its streams, each of at least one window.
        share: of the samples that are drawn from the history, above 0.
        samples: number of samples of the round.

    Raises:
        ValueError: the share is too small to be drawn at all.
    """
    streams, phases, first = _continued(history), [], 0
    drawn: list[int] = []
    while first < samples:
        weights = _weights(new, streams, Fraction(str(share)))
        pattern = pattern_of(weights)
        length = samples - first
        if not _is_whole_passes(pattern, streams, len(new)):
            least, most = _room(pattern, [stream.left for stream in streams], len(new))
            # A pattern begins half an interval before its first draw, so the phase ends half an interval after its last.
            replayed = sum(drawn) + int(pattern.drawn(most)[len(new) :].sum())
            length = min(length, max(least, min(most, round(replayed / share) - first)))
        phases.append(Phase(first, weights))
        counts = pattern.drawn(length)[len(new) :].tolist()
        drawn += counts
        pairs = zip(streams, counts, strict=True)
        streams = _continued([replace(stream, begin=stream.begin + count) for stream, count in pairs])
        first += length
    return Replay(share, samples, tuple(_continued(history)), tuple(phases))


def stream_shares(streams: Sequence[HistoryStream]) -> list[float]:
    """Share of each stream in the replayed samples of a pass that begins."""
    begun = [replace(stream, begin=0, end=stream.windows) for stream in streams]
    return [float(part) for part in _parts(begun, [True] * len(begun))]


def _continued(streams: Sequence[HistoryStream]) -> tuple[HistoryStream, ...]:
    """The streams, in the next pass if the current one is over."""
    if any(stream.left > 0 for stream in streams):
        return tuple(streams)
    passes = 1 + min(-stream.left // stream.windows for stream in streams)
    return tuple(replace(stream, end=stream.end + passes * stream.windows) for stream in streams)


def _weights(new: Sequence[float], streams: Sequence[HistoryStream], share: Fraction) -> tuple[int, ...]:
    """Integers in the proportion of each stream's share: new data's by weight, history's by what is left.

    History streams too small for the pattern wait until less of the others is left. Raises ValueError if all are.
    """
    given = [Fraction(str(weight)) for weight in new]
    fresh = [(1 - share) * weight / sum(given) for weight in given]
    drawn = [stream.left > 0 for stream in streams]
    while any(drawn):
        found = fresh + [share * part for part in _parts(streams, drawn)]
        counts = quotas(found)[len(new) :]
        if all(count or not part for count, part in zip(counts, found[len(new) :], strict=True)):
            scale = math.lcm(*(part.denominator for part in found))
            return tuple(int(part * scale) for part in found)
        drawn = [count > 0 for count in counts]
    raise ValueError(f"continual.replay = {float(share)}: is too small a share to be drawn")


def _parts(streams: Sequence[HistoryStream], drawn: Sequence[bool]) -> list[Fraction]:
    """Share of each stream in the history: of its run by windows left, of its source by weight."""
    left: dict[str, int] = defaultdict(int)
    weights: dict[str, Fraction] = defaultdict(Fraction)
    own = [Fraction(str(stream.left if stream.weight is None else stream.weight)) for stream in streams]
    for stream, weight, is_drawn in zip(streams, own, drawn, strict=True):
        if is_drawn:
            left[stream.identity] += stream.left
            weights[stream.identity] += weight
    total = sum(left.values())
    return [
        left[stream.identity] * weight / weights[stream.identity] / total if is_drawn else Fraction()
        for stream, weight, is_drawn in zip(streams, own, drawn, strict=True)
    ]


def _is_whole_passes(pattern: Pattern, streams: Sequence[HistoryStream], new: int) -> bool:
    """Whether repeating a pattern reads the streams pass after pass, all of them at the same pace."""
    counts = pattern.quotas[new:].tolist()
    fresh = all(stream.left == stream.windows for stream in streams)
    first = streams[0].windows
    pairs = zip(streams, counts, strict=True)
    return fresh and all(stream.windows * counts[0] == first * count for stream, count in pairs)


def _room(pattern: Pattern, left: Sequence[int], new: int) -> tuple[int, int]:
    """Samples until a stream has been read to its end, and until it would be read beyond."""
    found = []
    for number, windows in enumerate(left, new):
        if pattern.quotas[number]:
            last, beyond = (_position(pattern, number, rank) for rank in (windows - 1, windows))
            found.append((beyond, last + 1))
    most, least = min(found)
    return least, most


def _position(pattern: Pattern, stream: int, rank: int) -> int:
    """Sample that is a stream's sample of this rank."""
    repeats, rank = divmod(rank, int(pattern.quotas[stream]))
    return repeats * len(pattern.stream) + int(np.flatnonzero(pattern.stream == stream)[rank])
