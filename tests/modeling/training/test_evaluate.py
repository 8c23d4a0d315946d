"""Evaluation: which samples of the validation split are evaluated."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from modeling.compilation.graph_cache import EagerStatistics
from modeling.data.corpus import Corpus, Samples
from modeling.training.evaluate import Evaluation, evaluate_samples, evaluate_sets
from profiles.schema import Objective
from tests.modeling.data import test_records
from tests.modeling.data.datasets import write_dataset


def evaluated(samples, ranks, batches):
    """First token of each row that is evaluated in batches of four, in order of the ranks' passes."""
    rows = []
    for rank in range(ranks):
        trainer = SimpleNamespace(
            mesh=SimpleNamespace(data=SimpleNamespace(size=ranks, rank=rank)),
            profile=SimpleNamespace(
                train=SimpleNamespace(global_batch_size=4),
                objective=Objective(kind="sft"),
                rows_per_sample=1,
            ),
            read_batch=lambda samples, first, count: samples.batch(first, count),
            evaluate=lambda batch, counted, **_: (rows.extend(batch[:counted, 0]), torch.ones(2))[1],
            sum_on_host=torch.Tensor.tolist,
            compile_statistics=EagerStatistics(),
            metrics=[],
        )
        evaluate_samples(trainer, samples, batches)
    return rows


@pytest.mark.parametrize("span", [None, 100], ids=["all shuffled", "data.shuffle_tokens"])
def test_a_few_batches_represent_all_sources_and_are_the_same_on_any_topology(tmp_path, span):
    corpus = Corpus.open(write_dataset(tmp_path, np.arange(2001), [1000], span=span), "train")
    samples = Samples(corpus, 10, None)
    few = evaluated(samples, 1, 12)
    assert len(set(few)) == 48
    assert 12 <= sum(token < 1000 for token in few) <= 36
    assert sorted(evaluated(samples, 2, 12)) == sorted(evaluated(samples, 4, 12)) == sorted(few)
    assert evaluated(samples, 1, None) == evaluated(samples, 1, 50) == list(range(0, 2000, 10))


def test_a_few_batches_of_packed_records_represent_all_lengths(tmp_path):
    lengths = [8] * 20 + [7] * 20
    samples = test_records.make(tmp_path, [[(length, True)] * length for length in lengths], packed=True)
    assert 2 <= sum(token == 8 for token in evaluated(samples, 1, 2)) <= 6
    assert sorted(evaluated(samples, 2, 2)) == sorted(evaluated(samples, 1, 2))


def test_sets_are_evaluated_once_each_and_their_mean_is_per_token(tmp_path, monkeypatch):
    sources = [
        {"name": "first/a", "shards": 1},
        {"name": "first/b", "shards": 1},
        {"name": "round-1/a", "shards": 1},
    ]
    folder = write_dataset(tmp_path, np.arange(131), [100, 105], sources=sources)
    contents = json.loads((folder / "corpus.json").read_text())
    (folder / "corpus.json").write_text(json.dumps({**contents, "validation": contents["train"]}))
    samples = Samples(Corpus.open(folder, "validation"), 5, None)
    evaluated = []

    def evaluate(trainer, part, after_pass=None):
        (stream,) = part.corpus.streams
        evaluated.append((stream.start, part.windows))
        return Evaluation(float(stream.start), part.windows * 5, {"accuracy": 0.5}, {})

    monkeypatch.setattr("modeling.training.evaluate.evaluate_samples", evaluate)
    found = evaluate_sets(SimpleNamespace(metrics=["accuracy"]), samples)
    assert evaluated == [(0, 19), (105, 5)]  # the second set has less than a window
    assert found.sets == {"first/a": {"loss": 0, "tokens": 95}, "round-1/a": {"loss": 105, "tokens": 25}}
    assert (found.loss, found.tokens, found.metrics) == (105 * 25 / 120, 120, {"accuracy": 0.5})
