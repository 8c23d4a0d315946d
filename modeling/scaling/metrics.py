"""Forecasts of evaluation metrics by the law of the loss: losses by source, user metrics, tasks.

A metric that falls with compute is fitted directly, and a share that rises, such as accuracy, by its distance from 1. Most
metrics of small runs follow no such law, or do not change yet. So a forecast is made only if the backtest supports it: the
largest rungs must be forecast from the others within `MAX_ERROR`, and the fitted effect of size and length must exceed the
noise of a run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from modeling.scaling.fit import Observation, fit
from modeling.scaling.forecast import SHARE, backtest, drift_of

MAX_ERROR = 0.02  # relative error of the backtest
CLEAR = 3.0  # range that the rungs' fitted values must span, as a multiple of a run's noise
DRAWS = 100
MIN_VALUE = 1e-3  # least fitted value: a share that is closer to its limit has saturated


def forecast_metrics(
    rungs: Sequence[Observation], metrics: Sequence[Mapping[str, float]], n: float, d: float, seed: int = 0
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Forecast each metric that all rungs have for a run with n multiply-adds per token on d tokens.

    Args:
        metrics: metrics of each rung, by name.

    Returns:
        `value`, `interval` and `backtest_error` by name; and why each of the other metrics has no forecast.
    """
    common = [name for name in metrics[0] if all(name in found for found in metrics)]
    found: dict[str, dict[str, Any]] = {}
    without: dict[str, str] = {}
    for name in (name for name in common if "_stderr" not in name):
        values = np.array([row[name] for row in metrics], float)
        try:
            found[name] = _forecast(rungs, values, n, d, seed)
        except ValueError as error:
            without[name] = str(error)
    return found, without


def _forecast(
    rungs: Sequence[Observation], values: np.ndarray, n: float, d: float, seed: int
) -> dict[str, Any]:
    """Forecast of one metric. Raises ValueError if no fit supports it."""
    rises = _rises(rungs, values)
    falling = 1 - values if rises else values
    if falling.min() < MIN_VALUE:
        raise ValueError("is not positive in every rung, or has reached its limit")
    points = [Observation(rung.n, rung.d, float(value)) for rung, value in zip(rungs, falling, strict=True)]
    tested = backtest(points, seed, draws=1)  # without intervals
    if tested is None:
        raise ValueError(
            "has too few rungs for a backtest: three widths and three lengths without the largest"
        )
    errors = [math.log(row["forecast"] / row["loss"]) for row in tested]
    error = math.sqrt(sum(each**2 for each in errors) / len(errors))
    if error > MAX_ERROR:
        raise ValueError(f"misses the largest rungs by {error:.1%} in the backtest, above {MAX_ERROR:.0%}")
    first = fit(points, seed, draws=1)
    levels = np.log(first.law.loss(*np.array([(point.n, point.d) for point in points]).T))
    if np.ptp(levels) < CLEAR * first.noise:
        raise ValueError("hardly changes from the smallest rung to the largest")
    fitted = fit(points, seed, DRAWS)
    beyond = math.log(max(1.0, 6 * n * d / max(point.flops for point in points)))
    low, high = fitted.interval(n, d, seed, SHARE, drift_of(points, tested) * beyond)
    value = float(fitted.law.loss(n, d))
    if rises:
        value, low, high = 1 - value, 1 - high, 1 - low
    return {"value": value, "interval": [low, high], "backtest_error": error}


def _rises(rungs: Sequence[Observation], values: np.ndarray) -> bool:
    """Whether this metric is a share, from 0 to 1, that rises with compute."""
    if values.min() < 0 or values.max() > 1:
        return False
    compute = np.log([rung.flops for rung in rungs])
    return float(np.cov(compute, values)[0, 1]) > 0
