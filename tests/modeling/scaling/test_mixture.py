"""Mixture laws against planted ones: the proposed weights, a bad proxy, bounds, and nested designs."""

import json

import numpy as np
import pytest

from modeling.scaling import mixture as laws
from modeling.scaling.proxies import mixture_target, proxies_of, spread_weights
from profiles.experiments import Mixture

FLOOR = np.array([1.6, 1.2, 2.0])
EFFECTS = np.array([[-0.9, 0.5, 0.3], [0.6, -1.8, 0.2], [0.8, 0.9, -0.7]])  # of each weight on each source
AIM = np.array([0.6, 0.1, 0.3])
LOWEST, HIGHEST = np.full(3, 0.03), np.ones(3)


def truth(weights):
    """Losses (…, sources) of the planted law."""
    return FLOOR + np.exp(np.asarray(weights) @ EFFECTS.T)


def best_of_grid():
    """The lowest mean loss of all mixtures in steps of 1%."""
    axis = np.arange(0.03, 0.95, 0.01)
    grid = np.stack(np.meshgrid(axis, axis), -1).reshape(-1, 2)
    grid = np.column_stack([grid, 1 - grid.sum(1)])
    return (truth(grid[grid[:, 2] >= 0.03]) @ AIM).min()


@pytest.mark.parametrize("bad", [None, 5])
def test_planted_mixture_is_recovered_from_noisy_losses(bad):
    best, even = best_of_grid(), truth(np.full(3, 1 / 3)) @ AIM
    within = []
    for seed in range(3):
        chance = np.random.default_rng(seed)
        weights = np.array(spread_weights(3, 12, 0.03))
        losses = truth(weights) * np.exp(0.003 * chance.standard_t(4, (12, 3)) / 2**0.5)
        if bad is not None:
            losses[bad] *= 1.25  # a run that went wrong
        found = laws.fit(weights, losses, seed)
        proposed, drawn = laws.propose(found, AIM, LOWEST, HIGHEST)
        assert proposed.sum() == pytest.approx(1)
        assert best <= truth(proposed) @ AIM + 1e-3 < best + 0.1 * (even - best)
        low, high = np.quantile(drawn, [0.05, 0.95], axis=0)
        assert (low - 0.02 <= proposed).all()
        assert (proposed <= high + 0.02).all()
        low, high = np.quantile(found.outcomes(proposed, seed), [0.05, 0.95], axis=0)
        within += ((low <= truth(proposed)) & (truth(proposed) <= high)).tolist()
        assert ((high - low) / truth(proposed) < 0.12).all()
    assert sum(within) >= 8


def test_each_proxy_is_forecast_from_the_others():
    weights = np.array(spread_weights(3, 12, 0.03))
    errors = laws.left_out_errors(weights, truth(weights))
    assert np.median(np.abs(errors)) < 0.002
    assert np.isnan(laws.left_out_errors(weights[:5], truth(weights[:5]))).all()


def test_weight_of_a_source_with_too_few_tokens_is_limited():
    lowest, highest = laws.bounds(3, 0.05, [1e6, 2e5, 4e6], budget=1e7, passes=4.0)
    assert highest == pytest.approx([0.4, 0.08, 1.0])
    weights = np.array(spread_weights(3, 12, 0.03))
    proposed, _ = laws.propose(laws.fit(weights, truth(weights)), AIM, lowest, highest)
    assert (lowest - 1e-6 <= proposed).all()
    assert (proposed <= highest + 1e-6).all()
    # If there is too little data altogether, only the natural mixture remains.
    assert laws.bounds(2, 0.1, [3e5, 1e5], budget=1e7, passes=4.0)[1] == pytest.approx([0.75, 0.25])


def test_longer_designs_extend_shorter_ones_and_keep_the_least_weight():
    short, long = spread_weights(4, 5, 0.02), spread_weights(4, 20, 0.02)
    assert long[:5] == short
    assert np.sum(long, 1) == pytest.approx(1)
    assert np.min(long) >= 0.02
    assert np.max(np.mean(long, 0)) < 0.32  # each source gets about a quarter
    assert np.std(long, 0).min() > 0.1


def test_groups_with_equally_many_sources_have_proxies_of_different_names():
    sources = [{"kind": "files", "path": f"{name}.jsonl"} for name in "abc"]
    mixture = Mixture(
        name="mix",
        target="tiny",
        overrides=[f"data.sources={json.dumps(sources)}", "tokenizer.source=run:other"],
        proxy={"hidden_size": 48, "tokens_per_parameter": 1},
        proxies=[{"sources": ["a", "b"], "count": 2}, {"sources": ["a", "c"], "count": 2}, {"count": 2}],
    )
    names = [proxy.name for proxy in proxies_of(mixture, mixture_target(mixture))]
    assert names == [f"mix-{group}-{kind}" for group in ("2", "2.2", "3") for kind in ("natural", "01")]


def test_unsuitable_proxies_are_rejected():
    with pytest.raises(ValueError, match="4 proxies are too few for 3 sources; the fit needs at least 5"):
        laws.fit(spread_weights(3, 4, 0.03), np.full((4, 2), 3.0))
    with pytest.raises(ValueError, match="diverged"):
        laws.fit(spread_weights(2, 5, 0.03), np.full((5, 1), np.nan))
