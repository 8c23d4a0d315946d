"""Replay shares: fitted losses, and the share that learns the new and keeps the old."""

import numpy as np
import pytest

from modeling.scaling.shares import fit_shares, propose_share

SHARES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4)


def old(share):
    return 1.0 + 2.5 * (1 + np.asarray(share) / 0.02) ** -1.5


def new(share):
    return 0.8 + 0.3 * np.exp(1.2 * np.asarray(share))


def measured(noise: float) -> np.ndarray:
    chance = np.random.default_rng(3)
    losses = np.column_stack([old(SHARES), new(SHARES)])
    return losses * np.exp(noise * chance.standard_normal(losses.shape))


def test_share_with_lowest_mean_loss_is_found_within_its_interval():
    grid = np.linspace(0, 0.4, 401)
    best = grid[(old(grid) + new(grid)).argmin()]
    laws = fit_shares(SHARES, measured(0.002))
    for share in (0.01, 0.15, 0.3):
        assert laws.losses(share) == pytest.approx([old(share), new(share)], abs=0.06)
    found = propose_share(laws, 3.5, 0.01, (1, 1), 0.4)
    assert found.meets
    reached = old(found.share) + new(found.share)
    assert reached <= old(best) + new(best) + 0.01
    low, high = np.quantile(found.draws, [0.05, 0.95])
    assert low <= best <= high


def test_limit_of_the_old_loss_raises_the_share_and_one_out_of_reach_is_reported():
    laws = fit_shares(SHARES, measured(0))
    free = propose_share(laws, 3.5, 0.01, (0, 1), 0.4)
    bound = propose_share(laws, old(0.2), 0.01, (0, 1), 0.4)
    assert free.share == 0
    assert bound.share == pytest.approx(0.2, abs=0.03)
    impossible = propose_share(laws, 0.5, 0.01, (1, 1), 0.4)
    assert not impossible.meets
    assert impossible.share == 0.4


def test_too_few_shares_are_rejected():
    with pytest.raises(ValueError, match="3 shares are too few"):
        fit_shares([0, 0.1, 0.2, 0.2], np.ones((4, 2)))
