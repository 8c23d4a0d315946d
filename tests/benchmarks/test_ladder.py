"""Ladder benchmark: the source has the stated entropy, the target far more compute than its rungs."""

import numpy as np

from benchmarks import ladder as benchmark
from modeling.scaling.planned_run import rungs_of, target_of


def test_windows_are_a_function_of_seed_and_number():
    samples = benchmark.ChainSamples(3)
    across = samples.batch(benchmark.BLOCK - 2, 4)
    assert (across[2:] == benchmark.ChainSamples(3).batch(benchmark.BLOCK, 2)).all()
    assert (across[2:] != benchmark.ChainSamples(4).batch(benchmark.BLOCK, 2)).any()


def test_words_follow_the_transition_probabilities():
    windows = benchmark.ChainSamples(3).batch(0, 1024)
    table = benchmark._chain()
    chances = np.diff(table / table[:, -1:], axis=1, prepend=0)
    drawn = chances[windows[:, :-1], windows[:, 1:]]
    assert drawn.min() > 0
    # The cross-entropy under its own probabilities is the entropy, up to the noise of 32,768 words.
    assert abs(-np.log(drawn).mean() - benchmark.entropy()) < 0.05


def test_the_target_has_eight_times_the_compute_of_every_rung():
    ladder = benchmark.describe(0)
    target = target_of(ladder)
    rungs = rungs_of(ladder, target)
    assert len(rungs) >= 6
    assert target.flops >= 8 * max(rung.flops for rung in rungs)
    assert target.profile.train.seed == rungs[0].profile.train.seed == 0
    assert {rung.profile.train.learning_rate for rung in rungs} == {target.profile.train.learning_rate}
