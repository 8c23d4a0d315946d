"""The order of the training data: every window once an epoch, the same whatever the shards, the ranks and the past."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modeling import data
from modeling.data import Corpus, Samples
from modeling.indexed import IndexedDatasetBuilder, IndexedError
from modeling.order import permute

VOCABULARY = 50_000


def make(store, tokens, cuts=(), document=7):
    """A dataset folder in a store whose shards are `tokens` cut at `cuts`."""
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
    corpus = {"format": 1, "vocabulary_size": VOCABULARY, "eos": 0, "train": shards, "validation": []}
    (folder / "corpus.json").write_text(json.dumps(corpus))
    return folder


@settings(deadline=None)
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


@settings(deadline=None)
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
