"""Corpus and sample order: every window once per epoch, independent of shards, ranks and restarts."""

import json
import struct
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modeling.data import corpus as data
from modeling.data.corpus import Corpus, Samples
from modeling.data.indexed import IndexedError
from modeling.data.sample_order import blend, permute
from tests.modeling.data.datasets import VOCABULARY, write_dataset


@given(n=st.integers(1, 3000), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 2**40))
def test_permutation_is_a_bijection(n, seed, epoch):
    assert sorted(permute(np.arange(n), n, seed, epoch)) == list(range(n))


def test_permutation_is_uncorrelated_between_neighbours_and_epochs():
    n = 10_000
    first, second = (permute(np.arange(n), n, 1234, epoch) for epoch in (0, 1))
    for order in first, second, first - second:
        # with the corpus order, between neighbours and between epochs
        assert abs(np.corrcoef(np.arange(n), order)[0, 1]) < 0.05
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.05


def test_sample_order_is_stable_between_versions():
    """A run resumed with a newer version must continue with data it has not seen."""
    assert permute(np.arange(8), 1000, 1234, 0).tolist() == [409, 67, 394, 416, 571, 743, 50, 880]
    assert permute(np.array([10**12 - 1]), 10**12, 1234, 3).tolist() == [54027305403]


@settings(max_examples=40)
@given(
    tokens=st.integers(5, 400),
    cuts=st.lists(st.integers(0, 400), max_size=6),
    length=st.integers(1, 4),
    seed=st.one_of(st.none(), st.integers(0, 9)),
)
def test_every_epoch_reads_every_window_once_for_any_sharding(tokens, cuts, length, seed, tmp_path_factory):
    stream = np.arange(tokens)
    cuts = sorted(min(cut, tokens) for cut in cuts)
    corpus = Corpus.open(write_dataset(tmp_path_factory.mktemp("store"), stream, cuts), "train")
    samples = Samples(corpus, length, seed)
    assert samples.windows == (tokens - 1) // length
    for epoch in range(2):
        batch = samples.batch(epoch * samples.windows, samples.windows)
        assert sorted(batch[:, 0]) == [w * length for w in range(samples.windows)]
        assert (batch == batch[:, :1] + np.arange(length + 1)).all()


def test_samples_are_independent_of_ranks_batch_size_and_earlier_reads(tmp_path):
    folder = write_dataset(tmp_path, np.arange(1000), [300, 301, 800])
    expected = Samples(Corpus.open(folder, "train"), 16, seed=7).batch(0, 96)
    for ranks in 2, 4, 8:
        resumed = Samples(Corpus.open(folder, "train"), 16, seed=7)
        parts = [resumed.batch(first, 32 // ranks) for first in range(64, 96, 32 // ranks)]
        assert np.array_equal(np.concatenate(parts), expected[64:])


def test_epochs_and_seeds_differ_and_validation_is_in_corpus_order(tmp_path):
    corpus = Corpus.open(write_dataset(tmp_path, np.arange(1000)), "train")
    samples = Samples(corpus, 10, seed=1)
    epochs = [samples.batch(epoch * samples.windows, samples.windows)[:, 0] for epoch in range(2)]
    assert not np.array_equal(*epochs)
    assert not np.array_equal(epochs[0], Samples(corpus, 10, seed=2).batch(0, samples.windows)[:, 0])
    assert Samples(corpus, 10, seed=None).batch(0, 99)[:, 0].tolist() == list(range(0, 990, 10))


def test_at_most_open_shards_stay_mapped(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "OPEN_SHARDS", 3)
    corpus = Corpus.open(write_dataset(tmp_path, np.arange(200), range(10, 200, 10)), "train")
    assert Samples(corpus, 10, seed=1).batch(0, 19).shape == (19, 11)
    assert len(corpus._open) == 3


def test_shard_that_differs_from_corpus_json_is_rejected(tmp_path):
    folder = write_dataset(tmp_path, np.arange(100), [50])
    path = tmp_path / "artifacts/tokens/key1/train.bin"
    path.write_bytes(path.read_bytes()[:-2])
    samples = Samples(Corpus.open(folder, "train"), 99, seed=1)
    with pytest.raises(IndexedError, match=r"key1/train\.bin, byte 98: has 49 tokens, corpus\.json says 50"):
        samples.batch(0, 1)


def test_token_outside_the_vocabulary_is_rejected_with_file_and_offset(tmp_path):
    stream = np.arange(20)
    stream[13] = VOCABULARY
    samples = Samples(Corpus.open(write_dataset(tmp_path, stream, [5]), "train"), 19, seed=1)
    with pytest.raises(IndexedError, match=r"key1/train\.bin, byte 16: token 50000 is not in the vocabulary"):
        samples.batch(0, 1)


def test_corpus_shorter_than_one_window_is_rejected(tmp_path):
    corpus = Corpus.open(write_dataset(tmp_path, np.arange(8)), "train")
    with pytest.raises(ValueError, match=r"train\.sequence_length = 8: a corpus of 8 tokens"):
        Samples(corpus, 8, seed=1)


WEIGHTS = st.lists(st.integers(1, 999).map(lambda n: n / 1000), min_size=1, max_size=6)


@given(weights=WEIGHTS)
def test_blend_keeps_each_streams_share_throughout_and_exactly_per_pattern(weights):
    pattern = blend(weights)
    period = len(pattern.stream)
    shares = np.array(weights) / sum(weights)
    assert np.allclose(pattern.quotas, shares * period, atol=0.5 if period < 2**20 else 1)
    streams, numbers = pattern.locate(np.arange(3 * min(period, 5000)))
    for stream, share in enumerate(shares):
        local = numbers[streams == stream]
        assert local.tolist() == list(range(len(local)))  # each stream's samples in order, none skipped
        drawn = np.cumsum(streams == stream)
        expected = share * np.arange(1, len(streams) + 1)
        assert np.abs(drawn - expected).max() <= max(1.0, len(weights) / 2)


def test_weight_too_small_to_be_drawn_is_rejected():
    with pytest.raises(ValueError, match="stream 1 has less than one of 1,048,576 samples"):
        blend([3, 1e-7])


def test_weighted_sources_are_read_at_their_shares_for_any_size(tmp_path):
    sources = [{"weight": 0.5, "shards": 2}, {"weight": None, "shards": 1}, {"weight": 0.25, "shards": 1}]
    corpus = Corpus.open(write_dataset(tmp_path, np.arange(4000), [500, 1000, 3000], blend=sources), "train")
    samples = Samples(corpus, 10, seed=3)
    starts = samples.window_starts(np.arange(1200))
    first, second = starts[starts < 1000], starts[starts >= 3000]
    assert (len(first), len(second)) == (800, 400)
    assert (starts[(starts >= 1000) & (starts < 3000)]).size == 0
    for starts, windows in (first, 99), (second - 3000, 99):  # each source has its own epochs
        assert sorted(starts[:windows]) == list(range(0, 990, 10))
        assert sorted(starts[windows : 2 * windows]) == list(range(0, 990, 10))
        assert starts[:windows].tolist() != starts[windows : 2 * windows].tolist()


def test_mixture_change_continues_each_source_whichever_sample_is_read_first(tmp_path):
    sources = [{"weight": 3, "shards": 1}, {"weight": None, "shards": 1}, {"weight": 1, "shards": 1}]
    corpus = Corpus.open(write_dataset(tmp_path, np.arange(4000), [1000, 3000], blend=sources), "train")
    changes = [(50, {0: 1.0, 2: 3.0}), (130, {0: 0.0, 2: 1.0})]
    samples = Samples(corpus, 10, 3, changes)
    starts = samples.window_starts(np.arange(200))
    is_last = starts >= 3000
    assert [is_last[a:b].mean() for a, b in ((0, 48), (50, 130), (130, 200))] == [0.25, 0.75, 1.0]
    unchanged = Samples(corpus, 10, 3).window_starts(np.arange(600))
    assert starts[:50].tolist() == unchanged[:50].tolist()
    for source in (starts[~is_last], starts[is_last]):  # in order, no window repeated or skipped
        expected = unchanged[(unchanged >= 3000) == (source[0] >= 3000)]
        assert source.tolist() == expected[: len(source)].tolist()
    for first in (0, 49, 50, 51, 129, 130, 199):  # as in a run that resumes there
        assert Samples(corpus, 10, 3, changes).window_starts(np.array([first])) == starts[first]
    from_the_start = Samples(corpus, 10, 3, [(0, {0: 0.0, 2: 1.0})])
    assert (from_the_start.window_starts(np.arange(40)) >= 3000).all()


@settings(max_examples=30)
@given(span=st.integers(1, 70), seed=st.integers(0, 99))
def test_span_shuffling_reads_every_window_once_from_few_spans_at_a_time(span, seed, tmp_path_factory):
    folder = write_dataset(tmp_path_factory.mktemp("store"), np.arange(601), [200, 400], span=span * 10)
    samples = Samples(Corpus.open(folder, "train"), 10, seed)
    for epoch in range(2):
        windows = samples.window_starts(np.arange(epoch * 60, epoch * 60 + 60)) // 10
        assert sorted(windows) == list(range(60))
        width = -(-60 // -(-60 // span))
        for at in range(0, 60 - width, width):
            assert len({int(window) // width for window in windows[at : at + width]}) <= 4


def test_corpus_of_many_shards_opens_in_constant_work_and_memory(tmp_path):
    """10^12 tokens in 20,000 shards, all one sparse file."""
    shards, tokens = 20_000, 50_000_000
    prefix = tmp_path / "artifacts/tokens/k/train"
    prefix.parent.mkdir(parents=True)
    with prefix.with_suffix(".bin").open("wb") as file:
        file.truncate(2 * tokens)
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 1, 2) + struct.pack("<iqqq", tokens, 0, 0, 1)
    prefix.with_suffix(".idx").write_bytes(index)
    entries = [{"path": "tokens/k/train", "start": 0, "tokens": tokens, "documents": 1}] * shards
    folder = tmp_path / "artifacts/dataset/k"
    folder.mkdir(parents=True)
    corpus = {"format": 1, "vocabulary_size": 50_000, "eos": 0, "train": entries, "validation": entries}
    (folder / "corpus.json").write_text(json.dumps(corpus))
    program = """
import resource, sys
from modeling.data.corpus import Corpus, Samples
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
store, opened = sys.argv[1].partition("/artifacts/")[0], []
def count(event, about):
    if event == "open" and store in str(about[0]) and about[1]:  # os.open has no mode, and is within another open
        opened.append(about[0])
sys.addaudithook(count)
samples = Samples(Corpus.open(sys.argv[1], "train"), 8192, seed=1)
at_open = len(opened)
batch = samples.batch(10**7, 64)
kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(samples.corpus.tokens, batch.shape[1], kilobytes, at_open, len(opened) - at_open)
"""
    result = subprocess.run(
        [sys.executable, "-c", program, str(folder)], capture_output=True, text=True, check=True
    )
    total, length, kilobytes, at_open, by_batch = map(int, result.stdout.split())
    assert (total, length) == (10**12, 8193)
    assert kilobytes < 100_000
    assert at_open == 1  # corpus.json
    assert 64 <= by_batch <= 2 * 64 + 4  # .bin and .idx of the shards read; few windows span two
