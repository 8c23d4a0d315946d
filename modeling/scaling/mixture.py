"""Mixture laws: losses by source fitted to proxy runs, and the weights that minimise their mean.

The law (Data Mixing Laws, arXiv 2403.16952), for the held-out loss of source i under training weights w that sum to 1:

    L_i(w) = c_i + exp(Σ_j t_ij · w_j)        c_i ≥ 0

The paper's factor k_i is a common summand of the t_ij. For a given c_i, the t_ij are a robust log-linear fit: Gauss-Newton with
Huber weights of the relative error, starting from the least squares of log(L_i - c_i). c_i is found on a grid, which is then
refined, so the result does not depend on an initial value. Where the proxies do not determine the differences of t_ij, a wide
prior pulls them towards 0. The noise of a run is estimated from the median residual, so that an outlier has little effect on the
fit and on the noise.

Each draw of the bootstrap gives the proxies random weights and adds noise, as in fit.py. The proposed weights minimise the
weighted mean loss, averaged over the draws. Each L_i is convex in w, and so are sums of them, so projected gradient descent finds
the minimum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from modeling.scaling.fit import HUBER, NOISE, resample, run_noise

DRAWS = 100
SPREAD = 2.0  # standard deviation of the prior of t_ij around their mean over j
SHARES = np.linspace(0.0, 0.96, 9)  # grid of c_i, as shares of the lowest loss
FINE = 5  # points of the grid's refinements
ITERATIONS = 5  # of Gauss-Newton
DESCENT, BISECTIONS = 200, 30  # steps of the search for weights, and of its projections
TINY = 1e-9


@dataclass(frozen=True)
class MixtureLaws:
    """Fitted laws of h sources' losses under k training weights, and of b bootstrap draws; float64.

    Attributes:
        floor: c_i, (h).
        effects: t_ij, (h, k).
        floors, draws: the same of the draws, (h, b) and (h, b, k).
        noise: relative noise of one run's loss by source, (h).
    """

    floor: np.ndarray
    effects: np.ndarray
    floors: np.ndarray
    draws: np.ndarray
    noise: np.ndarray

    def losses(self, weights: np.ndarray) -> np.ndarray:
        """Losses (h) in nats per token under weights (k)."""
        return self.floor + np.exp(self.effects @ weights)

    def drawn(self, weights: np.ndarray) -> np.ndarray:
        """Losses (b, h) under weights (k) by the laws of the draws."""
        return (self.floors + np.exp(self.draws @ weights)).T

    def outcomes(self, weights: np.ndarray, seed: int) -> np.ndarray:
        """Losses (b, h) that one run with these weights may have: those of the draws, with the noise of a run."""
        losses = self.drawn(weights)
        return losses * np.exp(self.noise * run_noise(np.random.default_rng(seed), losses.shape))


def fit(weights: np.ndarray, losses: np.ndarray, seed: int = 0, draws: int = DRAWS) -> MixtureLaws:
    """Fit the laws to proxies' weights (n, k) and losses (n, h). Deterministic in the seed.

    Raises:
        ValueError: fewer than k + 2 proxies, or a loss that is not positive.
    """
    weights, losses = np.asarray(weights, float), np.asarray(losses, float)
    n, k = weights.shape
    if n < k + 2:
        raise ValueError(f"{n} proxies are too few for {k} sources; the fit needs at least {k + 2}")
    if not (np.isfinite(losses).all() and (losses > 0).all()):
        raise ValueError("a proxy's loss is not a positive number; its run diverged")
    chance = np.random.default_rng(seed)
    counts = resample(chance, (draws, n))
    unsure = np.sqrt(n / chance.chisquare(n, (draws, 1)))
    found = []
    for y in losses.T:
        noise, even = NOISE, np.ones((1, n))
        for _ in range(3):  # the noise and the fit depend on each other
            floor, effects = _solve(weights, y[None], even, noise)
            residuals = np.log(y / (floor + np.exp(effects @ weights.T))[0])
            spread = 1.4826 * np.median(np.abs(residuals)) * np.sqrt(n / max(1, n - k - 1))
            noise = max(NOISE, float(spread))
        noisy = y * np.exp(noise * unsure * run_noise(chance, (draws, n)))
        found.append((floor[0, 0], effects[0], *_solve(weights, noisy, counts, noise), noise))
    floor, effects, floors, drawn, noises = (np.array(part) for part in zip(*found, strict=True))
    return MixtureLaws(floor, effects, floors[..., 0], drawn, noises)


def left_out_errors(weights: np.ndarray, losses: np.ndarray) -> np.ndarray:
    """Relative errors (n, h) of forecasting each proxy's losses from the others; NaN if too few remain."""
    weights, losses = np.asarray(weights, float), np.asarray(losses, float)
    n, k = weights.shape
    if n < k + 3:
        return np.full(losses.shape, np.nan)
    rows = []
    for left_out in range(n):
        others = np.arange(n) != left_out
        laws = fit(weights[others], losses[others], draws=1)
        rows.append(laws.losses(weights[left_out]) / losses[left_out] - 1)
    return np.array(rows)


def propose(
    laws: MixtureLaws, objective: np.ndarray, lowest: np.ndarray, highest: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The weights (k) with the lowest weighted mean loss within bounds (k), and those of each draw (b, k).

    Args:
        objective: (h) weights of the sources' losses.
    """
    objective = np.asarray(objective, float) / np.sum(objective)
    joint = _minimise(laws.floors.T[None], laws.draws.swapaxes(0, 1)[None], objective, lowest, highest)[0]
    each = _minimise(laws.floors.T[:, None], laws.draws.swapaxes(0, 1)[:, None], objective, lowest, highest)
    return joint, each


def _minimise(
    floors: np.ndarray, effects: np.ndarray, objective: np.ndarray, lowest: np.ndarray, highest: np.ndarray
) -> np.ndarray:
    """Weights (p, k) that minimise p problems' means over m laws: floors (p, m, h), effects (p, m, h, k)."""
    lowest, highest = np.asarray(lowest, float), np.asarray(highest, float)

    def value(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        grown = np.exp(np.einsum("pmhk,pk->pmh", effects, w)) * objective
        total = (floors * objective + grown).sum(-1).mean(-1)
        return total, np.einsum("pmh,pmhk->pk", grown, effects) / floors.shape[1]

    w = _project(np.full((len(floors), len(lowest)), 1 / len(lowest)), lowest, highest)
    step = np.full((len(w), 1), 0.1)
    current, gradient = value(w)
    for _ in range(DESCENT):
        moved = _project(w - step * gradient, lowest, highest)
        found, ahead = value(moved)
        better = (found <= current)[:, None]
        w, gradient = np.where(better, moved, w), np.where(better, ahead, gradient)
        current = np.minimum(found, current)
        step = np.where(better, step * 1.5, step / 2)
    return w


def _project(w: np.ndarray, lowest: np.ndarray, highest: np.ndarray) -> np.ndarray:
    """Nearest weights (p, k) within bounds (k) that sum to 1, by bisection of the amount subtracted."""
    low, high = (w - highest).min(1, keepdims=True), (w - lowest).max(1, keepdims=True)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        above = np.minimum(np.maximum(w - middle, lowest), highest).sum(1, keepdims=True) > 1
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    return np.clip(w - (low + high) / 2, lowest, highest)


def _solve(
    weights: np.ndarray, losses: np.ndarray, counts: np.ndarray, noise: float
) -> tuple[np.ndarray, np.ndarray]:
    """Best floors (b, 1) and effects (b, k) for losses and counts (b, n) of proxies with weights (n, k)."""
    lowest = losses.min(1, keepdims=True)
    shares = np.broadcast_to(SHARES, (len(losses), len(SHARES)))
    width = SHARES[1] - SHARES[0]
    best: list[np.ndarray] = []  # floors, effects and cost
    for _ in range(3):  # the grid, and two refinements
        floors = shares * lowest  # (b, g)
        effects, cost = _gauss_newton(weights, losses, counts, floors, noise)
        chosen = cost.argmin(1)[:, None]
        found = [
            np.take_along_axis(floors, chosen, 1),
            np.take_along_axis(effects, chosen[..., None], 1)[:, 0],
            np.take_along_axis(cost, chosen, 1),
        ]
        if best:
            better = found[2] < best[2]
            found = [np.where(better, new, old) for new, old in zip(found, best, strict=True)]
        best = found
        around = np.linspace(-width, width, FINE)
        shares = np.clip(best[0] / lowest + around, 0, SHARES[-1])
        width = width * 2 / (FINE - 1)
    return best[0], best[1]


def _gauss_newton(
    weights: np.ndarray, losses: np.ndarray, counts: np.ndarray, floors: np.ndarray, noise: float
) -> tuple[np.ndarray, np.ndarray]:
    """Best effects (b, g, k) and their costs (b, g) for each floor (b, g)."""
    k = weights.shape[1]
    prior = (np.eye(k) - 1 / k) / SPREAD**2  # of the differences only
    y, counts = losses[:, None], counts[:, None]  # (b, 1, n)
    above = np.maximum(y - floors[..., None], TINY)  # (b, g, n)

    def cost(effects: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        grown = np.exp(np.clip(effects @ weights.T, -40, 40))  # (b, g, n)
        errors = (y - floors[..., None] - grown) / (y * noise)
        size = np.abs(errors)
        huber = np.where(size <= HUBER, 0.5 * size**2, HUBER * (size - 0.5 * HUBER))
        penalty = 0.5 * np.einsum("bgk,kj,bgj->bg", effects, prior, effects)
        return (counts * huber).sum(-1) + penalty, grown, errors

    # The error of log(L - c) is the relative error of L times L / (L - c).
    first = counts * (above / (y * noise)) ** 2
    effects = _normal(weights, first, np.log(above), prior)
    best, lowest = effects, np.full(floors.shape, np.inf)
    for _ in range(ITERATIONS):
        found, grown, errors = cost(effects)
        better = found < lowest
        best, lowest = np.where(better[..., None], effects, best), np.minimum(found, lowest)
        slope = grown / (y * noise)  # of the errors, per unit of the exponent
        robust = counts * np.minimum(1, HUBER / np.maximum(np.abs(errors), TINY))
        # The next effects minimise the linearised errors; exponents move by at most 1.
        target = effects @ weights.T + np.clip(errors / np.maximum(slope, TINY), -1, 1)
        effects = _normal(weights, robust * slope**2, target, prior)
    found, *_ = cost(effects)
    better = found < lowest
    return np.where(better[..., None], effects, best), np.minimum(found, lowest)


def _normal(weights: np.ndarray, counts: np.ndarray, target: np.ndarray, prior: np.ndarray) -> np.ndarray:
    """Effects (b, g, k) of the weighted least squares of exponents (b, g, n) with a prior (k, k)."""
    gram = np.einsum("bgn,nk,nj->bgkj", counts, weights, weights, optimize=True) + prior
    gram = gram + 1e-12 * np.trace(gram, axis1=-2, axis2=-1)[..., None, None] * np.eye(weights.shape[1])
    right = np.einsum("bgn,nk->bgk", counts * target, weights, optimize=True)
    return np.linalg.solve(gram, right[..., None])[..., 0]


def bounds(
    k: int, minimum: float, tokens: Sequence[float], budget: float, passes: float | None
) -> tuple[np.ndarray, np.ndarray]:
    """Bounds (k) of weights: the minimum, and that at which a source's tokens are read `passes` times.

    If all sources together have too few tokens, each may be read as often as a mixture in proportion to size would read all.
    """
    lowest = np.full(k, minimum)
    if passes is None:
        return lowest, np.ones(k)
    highest = np.minimum(1.0, passes * np.asarray(tokens, float) / budget)
    highest = highest / min(1.0, highest.sum() * (1 - TINY))
    # A source too small for the minimum gets its upper bound.
    return np.minimum(lowest, highest), highest
