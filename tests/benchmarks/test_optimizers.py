"""Optimizers benchmark: tokens to a loss, and windows of text that do not repeat."""

import math

import numpy as np
import pytest

from benchmarks import optimizers as benchmark
from modeling.scaling.law import Law


def test_tokens_to_a_loss_invert_the_law():
    law = Law(irreducible=1.5, size=0.4, data=0.3, alpha=0.4, beta=0.3, scale=(1e4, 1e6))
    assert benchmark.tokens_to(float(law.loss(3e4, 2e6)), law, 3e4) == pytest.approx(2e6)
    assert benchmark.tokens_to(1.5, law, 3e4) == math.inf


def test_a_loss_is_reached_between_the_shares_whose_losses_enclose_it():
    losses = [2.5, 2.3, 2.1, 2.0, 1.9]
    assert benchmark.reached(2.2, losses) == pytest.approx(math.sqrt(math.prod(benchmark.SHARES[1:3])))
    assert (benchmark.reached(2.6, losses), benchmark.reached(1.8, losses)) == (0.0, math.inf)


def test_windows_of_text_are_shuffled_and_overlap_by_one_byte():
    text = np.arange(20 * 32 + 1) % 251
    samples = benchmark.Text(text, seed=1)
    windows = samples.batch(0, samples.windows)
    assert sorted(windows[:, 0]) == sorted(text[: 20 * 32 : 32])
    assert (windows[:, 1:] - windows[:, :-1] % 251 == 1).mean() > 0.99
    assert (windows != benchmark.Text(text, seed=2).batch(0, 20)).any()
