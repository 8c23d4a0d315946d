"""The order of the training data: every window once an epoch, the same whatever the shards, the ranks and the past."""

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
from modeling.data.indexed import IndexedDatasetBuilder, IndexedError
from modeling.data.sample_order import blend, permute

VOCABULARY = 50_000


def make(store, tokens, cuts=(), document=7, **more):
    """A dataset folder in a store whose shards are `tokens` cut at `cuts`; `more` is for its corpus.json."""
    shards = []
    for i, part in enumerate(np.split(np.asarray(tokens), cuts)):
        prefix = store / "artifacts" / "tokens" / f"key{i}" / "train"
        prefix.parent.mkdir(parents=True)
        with IndexedDatasetBuilder(prefix, np.dtype(np.uint16)) as builder:
            for at in range(0, len(part), document):
                builder.add_document(part[at : at + document])
        shards.append(
            {"path": f"tokens/key{i}/train", "tokens": len(part), "documents": len(builder.lengths)}
        )
    folder = store / "artifacts" / "dataset" / "key"
    folder.mkdir(parents=True)
    corpus = {"format": 1, "vocabulary_size": VOCABULARY, "eos": 0, "train": shards, "validation": [], **more}
    (folder / "corpus.json").write_text(json.dumps(corpus))
    return folder


@given(n=st.integers(1, 3000), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 2**40))
def test_permutation_is_a_bijection(n, seed, epoch):
    assert sorted(permute(np.arange(n), n, seed, epoch)) == list(range(n))


def test_permutation_scatters_neighbours_and_epochs():
    n = 10_000
    first, second = (permute(np.arange(n), n, 1234, epoch) for epoch in (0, 1))
    for order in first, second, first - second:
        # uncorrelated with the natural order, with its own neighbours and with the other epoch
        assert abs(np.corrcoef(np.arange(n), order)[0, 1]) < 0.05
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.05


def test_order_never_changes_between_versions():
    """A run resumed with a newer version must go on with the data it has not seen."""
    assert permute(np.arange(8), 1000, 1234, 0).tolist() == [409, 67, 394, 416, 571, 743, 50, 880]
    assert permute(np.array([10**12 - 1]), 10**12, 1234, 3).tolist() == [54027305403]


@given(
    tokens=st.integers(5, 400),
    cuts=st.lists(st.integers(0, 400), max_size=6),
    length=st.integers(1, 4),
    seed=st.one_of(st.none(), st.integers(0, 9)),
)
def test_every_epoch_reads_every_window_once_whatever_the_shards(
    tokens, cuts, length, seed, tmp_path_factory
):
    stream = np.arange(tokens)
    cuts = sorted(min(cut, tokens) for cut in cuts)
    corpus = Corpus.open(make(tmp_path_factory.mktemp("store"), stream, cuts), "train")
    samples = Samples(corpus, length, seed)
    assert samples.windows == (tokens - 1) // length
    for epoch in range(2):
        batch = samples.batch(epoch * samples.windows, samples.windows)
        assert sorted(batch[:, 0]) == [w * length for w in range(samples.windows)]
        assert (batch == batch[:, :1] + np.arange(length + 1)).all()


def test_samples_do_not_depend_on_ranks_batches_or_what_was_read_before(tmp_path):
    folder = make(tmp_path, np.arange(1000), [300, 301, 800])
    whole = Samples(Corpus.open(folder, "train"), 16, seed=7).batch(0, 96)
    for ranks in 2, 4, 8:
        resumed = Samples(Corpus.open(folder, "train"), 16, seed=7)
        parts = [resumed.batch(first, 32 // ranks) for first in range(64, 96, 32 // ranks)]
        assert np.array_equal(np.concatenate(parts), whole[64:])


def test_epochs_and_seeds_differ_and_validation_is_in_natural_order(tmp_path):
    corpus = Corpus.open(make(tmp_path, np.arange(1000)), "train")
    samples = Samples(corpus, 10, seed=1)
    epochs = [samples.batch(epoch * samples.windows, samples.windows)[:, 0] for epoch in range(2)]
    assert not np.array_equal(*epochs)
    assert not np.array_equal(epochs[0], Samples(corpus, 10, seed=2).batch(0, samples.windows)[:, 0])
    assert Samples(corpus, 10, seed=None).batch(0, 99)[:, 0].tolist() == list(range(0, 990, 10))


def test_few_shards_are_open_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "OPEN_SHARDS", 3)
    corpus = Corpus.open(make(tmp_path, np.arange(200), range(10, 200, 10)), "train")
    assert Samples(corpus, 10, seed=1).batch(0, 19).shape == (19, 11)
    assert len(corpus._open) == 3


def test_a_shard_that_is_not_what_the_manifest_says_is_refused(tmp_path):
    folder = make(tmp_path, np.arange(100), [50])
    path = tmp_path / "artifacts/tokens/key1/train.bin"
    path.write_bytes(path.read_bytes()[:-2])
    samples = Samples(Corpus.open(folder, "train"), 99, seed=1)
    with pytest.raises(IndexedError, match=r"key1/train\.bin, byte 98: has 49 tokens, corpus\.json says 50"):
        samples.batch(0, 1)


def test_a_token_beyond_the_vocabulary_is_refused_with_its_place(tmp_path):
    stream = np.arange(20)
    stream[13] = VOCABULARY
    samples = Samples(Corpus.open(make(tmp_path, stream, [5]), "train"), 19, seed=1)
    with pytest.raises(IndexedError, match=r"key1/train\.bin, byte 16: token 50000 is not in the vocabulary"):
        samples.batch(0, 1)


def test_a_corpus_shorter_than_one_window_is_refused(tmp_path):
    corpus = Corpus.open(make(tmp_path, np.arange(8)), "train")
    with pytest.raises(ValueError, match=r"train\.sequence_length = 8: a corpus of 8 tokens"):
        Samples(corpus, 8, seed=1)


WEIGHTS = st.lists(st.integers(1, 999).map(lambda n: n / 1000), min_size=1, max_size=6)


@given(weights=WEIGHTS)
def test_a_blend_has_each_streams_share_at_all_times_and_exactly_in_the_end(weights):
    pattern = blend(weights)
    period = len(pattern.stream)
    shares = np.array(weights) / sum(weights)
    assert np.allclose(pattern.quotas, shares * period, atol=0.5 if period < 2**20 else 1)
    streams, numbers = pattern.place(np.arange(3 * min(period, 5000)))
    for stream, share in enumerate(shares):
        own = numbers[streams == stream]
        assert own.tolist() == list(range(len(own)))  # each stream's samples in their order, none left out
        had = np.cumsum(streams == stream)
        wanted = share * np.arange(1, len(streams) + 1)
        assert np.abs(had - wanted).max() <= max(1.0, len(weights) / 2)


def test_a_weight_too_small_to_be_read_is_refused():
    with pytest.raises(ValueError, match="stream 1 has less than one of 1,048,576 samples"):
        blend([3, 1e-7])


def test_sources_with_weights_are_read_at_their_shares_whatever_their_sizes(tmp_path):
    sources = [{"weight": 0.5, "shards": 2}, {"weight": None, "shards": 1}, {"weight": 0.25, "shards": 1}]
    corpus = Corpus.open(make(tmp_path, np.arange(4000), [500, 1000, 3000], blend=sources), "train")
    samples = Samples(corpus, 10, seed=3)
    starts = samples.starts(np.arange(1200))
    first, second = starts[starts < 1000], starts[starts >= 3000]
    assert (len(first), len(second)) == (800, 400)
    assert (starts[(starts >= 1000) & (starts < 3000)]).size == 0
    for own, windows in (first, 99), (second - 3000, 99):  # epochs of each by itself
        assert sorted(own[:windows]) == list(range(0, 990, 10))
        assert sorted(own[windows : 2 * windows]) == list(range(0, 990, 10))
        assert own[:windows].tolist() != own[windows : 2 * windows].tolist()


@settings(max_examples=30)
@given(span=st.integers(1, 70), seed=st.integers(0, 99))
def test_shuffled_in_spans_every_window_comes_once_and_few_spans_are_open(span, seed, tmp_path_factory):
    folder = make(tmp_path_factory.mktemp("store"), np.arange(601), [200, 400], span=span * 10)
    samples = Samples(Corpus.open(folder, "train"), 10, seed)
    for epoch in range(2):
        windows = samples.starts(np.arange(epoch * 60, epoch * 60 + 60)) // 10
        assert sorted(windows) == list(range(60))
        width = -(-60 // -(-60 // span))
        for at in range(0, 60 - width, width):
            assert len({int(window) // width for window in windows[at : at + width]}) <= 4


def test_a_corpus_of_many_shards_opens_with_little_work_and_memory(tmp_path):
    """10^12 tokens in 20,000 shards: sparse files, of which those that are read have an index."""
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
from modeling.data import Corpus, Samples
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
store, opened = sys.argv[1].partition("/artifacts/")[0], []
sys.addaudithook(lambda event, about: event == "open" and store in str(about[0]) and opened.append(about[0]))
samples = Samples(Corpus.open(sys.argv[1], "train"), 8192, seed=1)
first = len(opened)
batch = samples.batch(10**7, 64)
kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(samples.corpus.tokens, batch.shape[1], kilobytes, first, len(opened) - first)
"""
    told = subprocess.run(
        [sys.executable, "-c", program, str(folder)], capture_output=True, text=True, check=True
    )
    total, length, kilobytes, first, then = map(int, told.stdout.split())
    assert (total, length) == (10**12, 8193)
    assert kilobytes < 100_000
    assert first == 1  # corpus.json: the work is the same for any number of tokens
    assert 64 <= then <= 2 * 64 + 4  # .bin and .idx of the shards that are read, few windows being of two
