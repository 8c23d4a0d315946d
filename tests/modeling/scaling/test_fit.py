"""The fitted law against a planted one: forecasts, their intervals, optimal sizes, and rejected rungs."""

import numpy as np
import pytest

from modeling.scaling import forecast as forecasts
from modeling.scaling.fit import Observation, fit
from modeling.scaling.law import Law

PLANTED = Law(1.7, 0.9, 0.6, 0.34, 0.31, (1e6, 1e8))
DRAWS = 60


def ladder(noise: float = 0.0, seed: int = 0) -> list[Observation]:
    """Nine rungs: three sizes and three lengths, with heavy-tailed noise on their losses."""
    chance = np.random.default_rng(seed)
    return [
        Observation(n, d, float(PLANTED.loss(n, d) * np.exp(noise * chance.standard_t(4) / 2**0.5)))
        for n in (1e6, 2e6, 4e6)
        for d in (5e7, 1e8, 2e8)
    ]


def test_planted_law_is_recovered_without_noise():
    found = fit(ladder(), draws=DRAWS)
    n, d = 12e6, 5.4e8  # 8 times the compute of the largest rung
    assert float(found.law.loss(n, d)) == pytest.approx(float(PLANTED.loss(n, d)), rel=3e-3)
    low, high = found.interval(n, d)
    assert low < float(PLANTED.loss(n, d)) < high


def test_intervals_contain_noisy_outcomes_and_an_outlier_has_little_effect():
    n, d = 12e6, 5.4e8
    truth = float(PLANTED.loss(n, d))
    contained = []
    for seed in range(6):
        low, high = fit(ladder(0.003, seed), draws=DRAWS).interval(n, d)
        contained.append(low <= truth <= high)
        assert (high - low) / truth < 0.08
    assert sum(contained) >= 5
    bad = ladder()
    bad[4] = Observation(bad[4].n, bad[4].d, bad[4].loss * 1.1)  # a run that went wrong
    found = fit(bad, draws=DRAWS)
    assert float(found.law.loss(n, d)) == pytest.approx(truth, rel=0.02)
    assert "N = 2,000,000 and 100,000,000 tokens: its loss" in forecasts.outlier_warnings(bad, found)[0]


def test_outliers_among_many_rungs_are_named_and_do_not_move_the_optimum():
    chance = np.random.default_rng(3)
    sizes, lengths = np.geomspace(6e7, 1.6e10, 15), np.geomspace(1e9, 1.4e12, 15)
    law = Law(1.8, 0.5, 0.4, 0.35, 0.36, (1e9, 2e10))
    points = [
        Observation(n, d, float(law.loss(n, d) * np.exp(0.003 * chance.standard_normal())), f"rung-{i}-{j}")
        for i, n in enumerate(sizes)
        for j, d in enumerate(lengths)
    ]
    flops = 5.76e23
    clean = fit(points, draws=1).law.optimum(flops)[0]
    assert clean == pytest.approx(law.optimum(flops)[0], rel=0.1)
    spoiled = [14, 29, 44, 59, 74]  # small models on much data
    for index in spoiled:
        point = points[index]
        points[index] = Observation(point.n, point.d, point.loss * 1.4, point.name)
    found = fit(points, draws=1)
    assert found.law.optimum(flops)[0] == pytest.approx(clean, rel=0.02)
    assert found.outliers == tuple(spoiled)
    warnings = forecasts.outlier_warnings(points, found)
    assert [text.partition(":")[0] for text in warnings] == [points[index].name for index in spoiled]
    assert "above the law, an outlier left out of the fit" in warnings[0]


def test_optimum_minimises_the_loss_for_a_budget():
    flops = 1e16
    n, d = PLANTED.optimum(flops)
    assert 6 * n * d == pytest.approx(flops)
    for factor in (0.9, 1.1):
        assert PLANTED.loss(n * factor, d / factor) > PLANTED.loss(n, d)


def test_forecast_has_a_backtest_and_the_gain_of_more_compute():
    found = forecasts.forecast(ladder(0.002), 12e6, 5.4e8)
    assert found["extrapolation"] == pytest.approx(12e6 * 5.4e8 / (4e6 * 2e8))
    assert [row["tokens"] for row in found["lengths"]][-1] == 5.4e8
    assert found["lengths"][0]["loss"] > found["loss"]
    left_out = found["backtest"]
    assert (len(left_out), left_out[-1]["n"], left_out[-1]["d"]) == (2, 4e6, 2e8)
    for row in left_out:
        assert row["forecast"] == pytest.approx(row["loss"], rel=0.02)
    assert 0 < found["budgets"][1]["gain"] < found["loss"]


@pytest.mark.parametrize(
    ("observations", "message"),
    [
        (ladder()[:4], "too few"),
        ([Observation(1e6, d, 3.0) for d in (1e7, 2e7, 3e7, 4e7, 5e7)], "different sizes"),
        ([Observation(n, n * 20, 3.0 if n > 1 else float("nan")) for n in (1, 2, 3, 4, 5)], "diverged"),
    ],
)
def test_unsuitable_rungs_are_rejected(observations, message):
    with pytest.raises(ValueError, match=message):
        fit(observations)


def test_rungs_whose_gains_grow_with_length_are_too_short():
    assert forecasts.too_short(ladder(0.002)) == []
    falling = [Observation(4e6, d, loss) for d, loss in ((5e5, 3.39), (1e6, 3.05), (2e6, 2.62))]
    (warning,) = forecasts.too_short([*ladder(), *falling])
    assert "N = 4,000,000 are too short" in warning
    assert "0.340, then 0.430" in warning
