"""The replayed part of a round: its share, and every window at most once per pass over the history."""

import json

import numpy as np
import pytest

from modeling.data.replay import HistoryStream, Replay, plan
from modeling.data.sample_order import MixtureSchedule


def stream(identity: str, windows: int, weight: float | None = None) -> HistoryStream:
    return HistoryStream(identity, "run", "", weight, 1, 8 * windows + 1, windows, 1, 0, windows)


def drawn(replay: Replay, new: int) -> list[tuple[int, int]]:
    """Number and window number of each replayed sample's stream, in order."""
    streams, numbers = MixtureSchedule(replay.phases).locate(np.arange(replay.samples))
    pairs = zip(streams.tolist(), numbers.tolist(), strict=True)
    return [(i - new, number + replay.streams[i - new].begin) for i, number in pairs if i >= new]


@pytest.mark.parametrize(
    "history",
    [
        [stream("a", 7)],
        [stream("a", 50), stream("b", 3), stream("c", 1)],
        [stream("a", 40, 3.0), stream("a", 20, 1.0), stream("b", 31)],
    ],
)
def test_rounds_replay_each_window_once_per_pass_while_the_history_grows(history):
    read, joined = [0] * len(history), [0] * len(history)  # windows read of each stream; its first pass
    for number, samples in enumerate([60, 100, 40, 300, 600]):
        replay = plan([2.0, 1.0], history, 0.2, samples)
        found = drawn(replay, 2)
        assert len(found) == pytest.approx(0.2 * samples, abs=len(replay.phases))
        for i, position in found:
            assert position == read[i]
            now = joined[i] + position // history[i].windows
            # Every other stream has been read to the end of the pass before.
            ends = [(now - first) * each.windows for each, first in zip(history, joined, strict=True)]
            assert all(count >= end for count, end in zip(read, ends, strict=True))
            read[i] += 1
        assert Replay.from_json(json.loads(json.dumps(replay.to_json()))) == replay
        history = [*replay.after(samples), stream(f"round-{number}", 20)]
        assert [each.begin for each in history] == [*read, 0]
        read.append(0)
        joined.append(joined[0] + history[0].end // history[0].windows - 1)
    assert joined[-1] > 0  # the history was replayed more than once


def test_history_larger_than_a_pattern_is_replayed_in_proportion():
    history = [stream("a", 10**9), stream("b", 10**6), stream("c", 3)]
    replay = plan([1.0], history, 0.05, 10**7)
    counts = replay.counts(10**7)
    assert sum(counts) == pytest.approx(5e5, rel=1e-4)
    assert counts[1] == pytest.approx(5e5 / 1001, rel=0.1)
    with pytest.raises(ValueError, match=r"continual.replay = 1e-08: is too small"):
        plan([1.0], history, 1e-8, 100)
