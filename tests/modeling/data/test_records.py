"""Samples made of records: packing, which tokens count, and where sequences start."""

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from modeling.data.corpus import Corpus, Stream
from modeling.data.indexed import IndexedDatasetBuilder
from modeling.data.records import (
    PADDING,
    RECORD_DTYPE,
    RecordSamples,
    Rows,
    pack_pairs,
    pack_rows,
    rows_path,
)

S = 8


@given(st.lists(st.integers(1, 16), max_size=40))
def test_packing_places_each_sequence_once_and_needs_few_rows(lengths):
    rows = pack_rows(np.array(lengths, np.int64), 16)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    filled = [sum(lengths[i] for i in row) for row in rows]
    assert all(size <= 16 for size in filled)
    assert sum(size <= 8 for size in filled) <= 1  # two such rows would have been packed into one


@given(st.lists(st.tuples(st.integers(2, 16), st.integers(2, 16)), max_size=40))
def test_packing_places_both_sequences_of_a_pair_in_one_sample(lengths):
    rows = pack_pairs(np.array(lengths, np.int64).flatten(), 16)
    assert sorted(i for row in rows for i in row) == list(range(2 * len(lengths)))
    assert [[i + 1 for i in row] for row in rows[::2]] == rows[1::2]
    flat = [length for pair in lengths for length in pair]
    filled = [sum(flat[i] for i in row) for row in rows]
    assert all(size <= 16 for size in filled)
    half_empty = [max(pair) <= 8 for pair in zip(filled[::2], filled[1::2], strict=True)]
    assert sum(half_empty) <= 1  # two such samples would have been packed into one


def make(folder, sequences, packed, rows_per_sample=1, seed=None):
    """Samples over sequences of (id, counts?) pairs, as the dataset step stores them."""
    prefix = folder / "artifacts/tokens/t/train"
    prefix.parent.mkdir(parents=True, exist_ok=True)
    stored = [np.array([i if counts else ~i for i, counts in sequence], np.int32) for sequence in sequences]
    with IndexedDatasetBuilder(prefix, RECORD_DTYPE) as builder:
        for sequence in stored:
            builder.add_document(sequence)
    target = folder / "artifacts/dataset/d"
    target.mkdir(parents=True, exist_ok=True)
    entry = {"path": "tokens/t/train", "tokens": sum(map(len, stored)), "documents": len(stored)}
    corpus = {"format": 1, "vocabulary_size": 100, "eos": 0, "records": True, "train": [entry]}
    (target / "corpus.json").write_text(json.dumps(corpus))
    lengths = np.array([len(sequence) for sequence in stored])
    counted = np.array([(sequence >= 0).sum() for sequence in stored])
    pack = pack_rows if rows_per_sample == 1 else pack_pairs
    rows = Rows.of(lengths, counted, pack(lengths, S) if packed else None)
    rows.write(rows_path(target, "train"))
    shape = rows_per_sample, S // 2 if packed and rows_per_sample > 1 else 1
    return RecordSamples(Corpus.open(target, "train"), rows_path(target, "train"), S, seed, *shape)


def sequences(*lengths):
    """Sequences of consecutive ids, of which the first two are the prompt."""
    return [[(10 * n + i, i > 1) for i in range(length)] for n, length in enumerate(lengths, 1)]


def test_packed_rows_contain_complete_sequences_and_their_counts(tmp_path):
    samples = make(tmp_path, sequences(5, 3, 7, 4), packed=True)
    assert samples.windows == 3
    assert samples.batch(0, 3).tolist() == [
        [~30, ~31, 32, 33, 34, 35, 36, PADDING, PADDING],
        [~10, ~11, 12, 13, 14, ~20, ~21, 22, PADDING],
        [~40, ~41, 42, 43, PADDING, PADDING, PADDING, PADDING, PADDING],
    ]
    assert samples.document_starts(1, 1).tolist() == [[0, 0, 0, 0, 0, 5, 5, 5]]
    assert [samples.count_targets(i, 1) for i in range(3)] == [5, 4, 2]
    assert samples.count_targets(0, 3) == 11
    assert samples.prompt(1).tolist() == [10, 11]


def test_every_row_is_read_once_per_epoch_in_the_order_of_the_seed(tmp_path):
    samples = make(tmp_path, sequences(5, 3, 7, 4), packed=False, seed=3)
    first = [row[0] for row in samples.batch(0, 4).tolist()]
    assert sorted(first) == [~40, ~30, ~20, ~10]
    assert samples.batch(0, 8)[:4].tolist() != samples.batch(4, 4).tolist()  # another epoch


def test_a_pair_is_two_rows(tmp_path):
    samples = make(tmp_path, sequences(5, 3, 7, 4), packed=False, rows_per_sample=2)
    assert samples.windows == 2
    assert [row[0] for row in samples.batch(1, 1).tolist()] == [~30, ~40]
    assert samples.count_targets(1, 1) == 1
    assert samples.pairs_per_token(0, 2) == 2 / (4 + 6)
    samples.reference = np.array([-1.0, -2.0, -3.0, -4.0], np.float32)
    assert samples.references(1, 1).tolist() == [[-3.0], [-4.0]]


def test_packed_pairs_have_numbers_and_counts_of_answers(tmp_path):
    samples = make(tmp_path, sequences(3, 2, 7, 8, 4, 6), packed=True, rows_per_sample=2)
    assert samples.windows == 2
    assert samples.batch(0, 2)[:, :7:6].tolist() == [[~10, 53], [~20, 64], [~30, 36], [~40, 46]]
    assert samples.sizes(0, 2).tolist() == [2, 2, 1, 1]
    assert [samples.count_targets(0, 1), samples.count_targets(1, 1), samples.count_targets(0, 2)] == [
        2,
        1,
        3,
    ]
    assert samples.answer_numbers(0, 1).tolist() == [[0, 0, -1, 1, 1, 1, -1, -1], [0, -1, 1, 1, 1, 1, 1, -1]]
    assert samples.pairs_per_token(0, 2) == 3 / (2 + 3 + 6)
    samples.reference = np.arange(6, dtype=np.float32)  # in order of rows
    assert samples.references(0, 1).tolist() == [[0, 1, 0, 0], [2, 3, 0, 0]]


def test_samples_of_each_source_are_separate(tmp_path):
    samples = make(tmp_path, [[(i, True)] * 4 for i in (1, 2, 3)], packed=False)
    samples.corpus.sources = {
        "one": Stream(1, 0, 8, 0),
        "empty": Stream(1, 8, 0, 1),
        "other": Stream(1, 8, 4, 2),
    }
    parts = samples.by_source()
    found = {name: part.batch(0, part.windows)[:, 0].tolist() for name, part in parts.items()}
    assert found == {"one": [1, 2], "other": [3]}
    assert parts["one"].count_targets(0, 2) == samples.count_targets(0, 2)
