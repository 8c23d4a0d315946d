"""Forecasts of metrics: only losses by source and rising shares that follow a law are forecast."""

import numpy as np
import pytest

from modeling.scaling.fit import Observation
from modeling.scaling.law import Law
from modeling.scaling.metrics import forecast_metrics

SIZES = [(n, d) for n in (1e6, 2e6, 4e6) for d in (5e7, 1e8, 2e8, 4e8)]
TARGET = (12e6, 5.4e8)
LAWS = {
    "validation_loss/code": Law(0.9, 0.5, 0.7, 0.30, 0.33, (1e6, 1e8)),
    "lm_eval/endings/acc": Law(0.1, 0.3, 0.25, 0.36, 0.31, (1e6, 1e8)),  # distance from 1
}


def test_metrics_are_forecast_if_a_fit_supports_them():
    chance = np.random.default_rng(0)
    rungs, metrics = [], []
    for n, d in SIZES:
        rungs.append(Observation(n, d, 3.0 * (n * d) ** -0.05))
        row = {name: float(law.loss(n, d) * np.exp(0.002 * chance.normal())) for name, law in LAWS.items()}
        row["lm_eval/endings/acc"] = 1 - row["lm_eval/endings/acc"]
        row |= {"lm_eval/endings/acc_stderr": 0.01, "lm_eval/guessed/acc": 0.25 * (1 + 0.1 * chance.normal())}
        row |= {"flat": 2.0 * (1 + 1e-4 * chance.normal()), "emerged": 0.0, "signed": chance.normal()}
        metrics.append(row)
    metrics[0]["only the first rung's"] = 1.0
    found, without = forecast_metrics(rungs, metrics, *TARGET)
    assert found.keys() == LAWS.keys()
    truth = {name: float(law.loss(*TARGET)) for name, law in LAWS.items()}
    truth["lm_eval/endings/acc"] = 1 - truth["lm_eval/endings/acc"]
    for name, row in found.items():
        low, high = row["interval"]
        assert low < truth[name] < high
        assert row["value"] == pytest.approx(truth[name], rel=0.02)
        assert row["backtest_error"] < 0.02
    assert "misses the largest rungs" in without["lm_eval/guessed/acc"]
    assert "hardly changes" in without["flat"]
    assert (
        without["emerged"] == without["signed"] == "is not positive in every rung, or has reached its limit"
    )
    few = slice(2, 8)  # two widths
    found, without = forecast_metrics(rungs[few], metrics[few], *TARGET)
    assert not found
    assert "too few rungs for a backtest" in without["validation_loss/code"]
