"""Forecast of a target run from a ladder's finished rungs, with a backtest, as one JSON document.

The loss is that of the fitted law (law.py, fit.py). Its bootstrap covers the noise of the rungs, but assumes that the law is
correct. The error of the law is estimated by a backtest: its relative error per factor of e in compute is the standard deviation
that widens the intervals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import numpy as np

from modeling.scaling.fit import MIN_RUNGS, MIN_WITHOUT, NOISE, Fit, Observation, fit

SHARE = 0.9  # probability of the intervals
LENGTHS = (0.1, 0.25, 0.5, 0.75, 1.0)  # shares of the target's tokens for which losses are forecast
BUDGETS = (1.0, 10.0)  # multiples of the target's compute for which the best size is computed
BACKTEST_DRAWS = 100
MIN_BEYOND = 0.5  # logarithm of compute: a rung that is hardly larger tells little about an extrapolation


def forecast(observations: Sequence[Observation], n: float, d: float, seed: int = 0) -> dict[str, Any]:
    """Forecast a run with n multiply-adds per token on d tokens.

    Returns:
        loss and interval at the end and, in `lengths`, of runs of the target's size that end earlier; the law's coefficients and
        the noise of a run; `drift`, by which intervals grow with the extrapolation; `extrapolation`, the target's compute over
        the largest rung's; in `budgets`, the best size for the target's compute and ten times that; `backtest`, None with too few
        rungs; `warnings` about rungs that do not suit a law.

    Raises:
        ValueError: the law cannot be fitted; the message states what is missing.
    """
    fitted = fit(observations, seed)
    largest = max(point.flops for point in observations)
    tested = backtest(observations, seed)
    drift = drift_of(observations, tested)

    def at(n: float, d: float) -> dict[str, Any]:
        return _at(fitted, n, d, seed, drift * math.log(max(1.0, 6 * n * d / largest)))

    return {
        **at(n, d),
        "share": SHARE,
        "lengths": [{"tokens": share * d, **at(n, share * d)} for share in LENGTHS],
        "drift": drift,
        "law": asdict(fitted.law),
        "noise": fitted.noise,
        "flops": 6 * n * d,
        "extrapolation": 6 * n * d / largest,
        "budgets": _budgets(fitted, 6 * n * d, seed),
        "backtest": tested,
        "warnings": [*too_short(observations), *outlier_warnings(observations, fitted)],
    }


def outlier_warnings(observations: Sequence[Observation], fitted: Fit) -> list[str]:
    """Warnings that name the rungs far from the law, with how the fit treats them."""
    effect = "left out of the fit" if len(observations) >= MIN_WITHOUT else "with limited weight in the fit"
    found = []
    for index in fitted.outliers:
        point, residual = observations[index], math.expm1(fitted.residuals[index])
        name = point.name or f"the rung with N = {point.n:,.0f} and {point.d:,.0f} tokens"
        side = "above" if residual > 0 else "below"
        found.append(
            f"{name}: its loss of {point.loss:.4f} is {abs(residual):.1%} {side} the law, an outlier {effect}; check whether its "
            "training went wrong"
        )
    return found


def too_short(observations: Sequence[Observation]) -> list[str]:
    """Warnings for sizes whose loss falls faster the longer they train, by more than the runs' noise.

    Every law of this form flattens with length. Runs that do not are still in the first phase of training, and mislead about
    longer runs.
    """
    found = []
    for n in sorted({point.n for point in observations}):
        runs = sorted((point for point in observations if point.n == n), key=lambda point: point.d)
        falls = [
            (before.loss - after.loss) / math.log2(after.d / before.d)
            for before, after in pairwise(runs)
            if after.d > before.d
        ]
        noise = math.sqrt(6) * NOISE * runs[-1].loss  # noise of a second difference
        if any(later - earlier > noise for earlier, later in pairwise(falls)):
            gains = ", then ".join(f"{fall:.3f}" for fall in falls)
            found.append(
                f"the rungs with N = {n:,.0f} are too short: each doubling of their tokens gains more than the one before "
                f"({gains}), which no scaling law describes; raise tokens_per_parameter"
            )
    return found


def backtest(
    observations: Sequence[Observation], seed: int = 0, draws: int = BACKTEST_DRAWS
) -> list[dict[str, Any]] | None:
    """Forecasts of the largest rungs from the others: up to a quarter of the rungs, so that enough remain.

    Returns None if too few would remain, or if the remaining ones cannot be fitted.
    """
    ordered = sorted(observations, key=lambda point: point.flops)
    count = min(max(1, len(ordered) // 4), len(ordered) - MIN_RUNGS)
    if count < 1:
        return None
    try:
        fitted = fit(ordered[:-count], seed, draws)
    except ValueError:
        return None
    rows = []
    for point in ordered[-count:]:
        found = _at(fitted, point.n, point.d, seed)
        rows.append({**asdict(point), "forecast": found["loss"], "interval": found["interval"]})
    return rows


def drift_of(observations: Sequence[Observation], tested: Sequence[dict[str, Any]] | None) -> float:
    """Relative backtest error per factor of e in compute beyond the fitted rungs; 0 without a backtest.

    A law that misses the largest rungs will miss the target by more, in proportion to the logarithm of the extrapolation.
    """
    if not tested:
        return 0.0
    left_out = {(row["n"], row["d"]) for row in tested}
    largest = max(point.flops for point in observations if (point.n, point.d) not in left_out)
    errors = [
        math.log(row["forecast"] / row["loss"]) / max(MIN_BEYOND, math.log(6 * row["n"] * row["d"] / largest))
        for row in tested
    ]
    return math.sqrt(sum(error**2 for error in errors) / len(errors))


def _at(fitted: Fit, n: float, d: float, seed: int, drift: float = 0.0) -> dict[str, Any]:
    interval = fitted.interval(n, d, seed, SHARE, drift)
    return {"loss": float(fitted.law.loss(n, d)), "interval": list(interval)}


def _budgets(fitted: Fit, flops: float, seed: int) -> list[dict[str, Any]]:
    """Best size, length and loss at multiples of a budget, and the gain of the largest over the smallest."""
    rows: list[dict[str, Any]] = []
    for multiple in BUDGETS:
        try:
            n, d = fitted.law.optimum(flops * multiple)
        except ValueError:
            return []
        sizes = [law.optimum(flops * multiple)[0] for law in fitted.draws if law.size and law.data]
        low, high = np.quantile(sizes, [(1 - SHARE) / 2, (1 + SHARE) / 2]) if sizes else (n, n)
        row = {"flops": flops * multiple, "n": n, "n_interval": [float(low), float(high)], "tokens": d}
        rows.append({**row, **_at(fitted, n, d, seed)})
    gains = [
        float(law.loss(*law.optimum(flops)) - law.loss(*law.optimum(flops * BUDGETS[-1])))
        for law in fitted.draws
        if law.size and law.data
    ]
    if gains:
        rows[-1]["gain"] = rows[0]["loss"] - rows[-1]["loss"]
        rows[-1]["gain_interval"] = np.quantile(gains, [(1 - SHARE) / 2, (1 + SHARE) / 2]).tolist()
    return rows
