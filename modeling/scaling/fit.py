"""Robust fit of the scaling law, and its bootstrap.

Minimises, over E, A, B ≥ 0 and the exponents,

    Σ w_i · huber((log L_i - log L̂_i) / s) + ½ ((α - 0.35)² + (β - 0.35)²) / 0.2²

by variable projection: for given exponents the law is linear in E, A and B, which are fitted by iteratively reweighted
non-negative least squares of the relative error, for a grid of exponents at once; the grid is then refined around its best point.
`s` is the noise of one run: the spread of the residuals, corrected for the fitted coefficients, and at least `NOISE`. The prior
on the exponents is wide compared with published values (0.28 to 0.37: arXiv 2203.15556, 2404.10102), so it matters only where
the rungs do not determine them. IsoFLOP parabolas are not used: they are biased unless each is centred on its optimum.

Huber's loss limits the weight of an outlier, but not to less than that of several good runs, and a few at one end of the ladder
move the optimum. With `MIN_WITHOUT` rungs or more, outliers are therefore left out of the fit; they are always reported.

Each draw of the bootstrap gives the rungs random weights (Bayesian bootstrap: no draw loses all rungs of a size), adds the
heavy-tailed noise of one run to their losses, and draws the centre of the prior from the prior, so that parameters that the rungs
do not determine widen the interval instead of being fixed by the prior (randomize-then-optimize). A forecast adds the noise of
the forecast run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from modeling.scaling.law import Law

MIN_RUNGS = 5  # with fewer, the fit would have no residuals
NOISE = 0.003  # least relative noise of one run's loss, about the difference between seeds
OUTLIER = 5.0  # residuals beyond this multiple of their spread, from the median, are outliers
MIN_WITHOUT = 20  # with as many rungs or more, outliers are left out; with fewer, HUBER limits their weight
MAX_OUTLIERS = 0.1  # share of the rungs; if more are far from the law, it is the law that does not fit
HUBER = 1.0  # residuals beyond this multiple of s count linearly
PRIOR, SPREAD = 0.35, 0.2  # mean and standard deviation of the exponents' prior
LOWEST, HIGHEST = 0.05, 1.5  # exponents
TAILS = 4  # degrees of freedom of the noise, a Student's t
DRAWS = 300
GRID, FINE = 16, 7  # points per side of the grid of exponents and of its refinements
BATCH = 2**17  # draws × points of the grid × rungs that are fitted at once, as fits in a CPU's cache
SUBSETS = [subset for size in (3, 2, 1) for subset in combinations(range(3), size)]


@dataclass(frozen=True)
class Observation:
    """A finished run: multiply-adds per token, training tokens, and held-out loss in nats per token."""

    n: float
    d: float
    loss: float
    name: str = ""  # of the run, for messages

    @property
    def flops(self) -> float:
        return 6 * self.n * self.d


@dataclass(frozen=True)
class Fit:
    """A fitted law, the laws of bootstrap draws, and the relative noise of one run.

    Attributes:
        outliers: indices of observations that are far from the law.
        residuals: log(loss / fitted loss) of each observation.
    """

    law: Law
    draws: tuple[Law, ...]
    noise: float
    outliers: tuple[int, ...]
    residuals: tuple[float, ...]

    def interval(
        self, n: float, d: float, seed: int = 0, share: float = 0.9, drift: float = 0.0
    ) -> tuple[float, float]:
        """Interval that contains the loss of one run with probability `share`.

        Args:
            drift: relative standard deviation of the law's own error.
        """
        chance = np.random.default_rng(seed)
        losses = np.array([float(law.loss(n, d)) for law in self.draws])
        losses = losses * np.exp(self.noise * run_noise(chance, len(losses)))
        losses = losses * np.exp(drift * chance.standard_normal(len(losses)))
        low, high = np.quantile(losses, [(1 - share) / 2, (1 + share) / 2])
        return float(low), float(high)


def fit(observations: Sequence[Observation], seed: int = 0, draws: int = DRAWS) -> Fit:
    """Fit the law to finished runs. Deterministic in the seed.

    Raises:
        ValueError: fewer than `MIN_RUNGS` runs, or fewer than 3 different sizes or lengths, or a loss that is not positive.
    """
    points = list(observations)
    n, d, losses = (
        np.array([getattr(point, name) for point in points], float) for name in ("n", "d", "loss")
    )
    if len(points) < MIN_RUNGS:
        raise ValueError(
            f"{len(points)} rungs are too few for 5 coefficients; add rungs, at least {MIN_RUNGS} in all"
        )
    for name, values in (("sizes", n), ("numbers of tokens", d)):
        if len(set(values)) < 3:
            raise ValueError(f"the rungs have {len(set(values))} different {name}; the fit needs at least 3")
    if not (np.isfinite(losses).all() and (losses > 0).all()):
        raise ValueError("a rung's loss is not a positive number; its run diverged")
    scale = (float(np.exp(np.log(n).mean())), float(np.exp(np.log(d).mean())))
    n, d = n / scale[0], d / scale[1]
    weights, noise = np.ones((1, len(n))), NOISE
    center = np.full((1, 2), PRIOR)
    for _ in range(3):  # the noise and the fit depend on each other
        found = _solve(n, d, losses[None], weights, center, noise)
        residuals = np.log(losses) - np.log(_predict(found, n, d)[0])
        typical = 1.4826 * np.median(np.abs(residuals))
        outliers = np.abs(residuals) > OUTLIER * max(NOISE, typical)
        if outliers.mean() > MAX_OUTLIERS and len(n) >= MIN_WITHOUT:
            outliers[:] = False
        if len(n) >= MIN_WITHOUT:
            weights = np.where(outliers, 0.0, 1.0)[None]
        freedom = max(1, weights.sum() - 3)  # E, A, B; the prior carries part of the exponents
        noise = max(NOISE, float(np.sqrt((weights[0] * residuals**2).sum() / freedom)), float(typical))
    chance = np.random.default_rng(seed)
    shape = (draws, len(n))
    counts = resample(chance, shape) * weights
    # A noise estimated from few residuals is uncertain itself, so it is scaled by √(ν/χ²).
    unsure = np.sqrt(len(n) / chance.chisquare(len(n), (draws, 1)))
    noisy = losses * np.exp(noise * unsure * run_noise(chance, shape))
    centers = np.clip(chance.normal(PRIOR, SPREAD, (draws, 2)), LOWEST, HIGHEST)
    laws = []
    for row in (*found, *_solve(n, d, noisy, counts, centers, noise)):
        irreducible, size, data, alpha, beta = map(float, row)
        laws.append(Law(irreducible, size, data, alpha, beta, scale))
    found_outliers = tuple(np.flatnonzero(outliers).tolist())
    return Fit(laws[0], tuple(laws[1:]), noise, found_outliers, tuple(residuals.tolist()))


def run_noise(chance: np.random.Generator, shape: int | tuple[int, ...]) -> np.ndarray:
    """Student's t with `TAILS` degrees of freedom, of unit variance."""
    return chance.standard_t(TAILS, shape) * np.sqrt((TAILS - 2) / TAILS)


def resample(chance: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Weights (draws, rungs) of the rungs in each draw, with mean 1, from a Dirichlet distribution."""
    return chance.dirichlet(np.full(shape[1], 4.0), shape[0]) * shape[1]


def _predict(laws: np.ndarray, n: np.ndarray, d: np.ndarray) -> np.ndarray:
    """Losses (laws, rungs) of laws (laws, 5): E, A, B, α, β."""
    e, a, b, alpha, beta = (column[:, None] for column in laws.T)
    return e + a * n**-alpha + b * d**-beta


def _solve(
    n: np.ndarray, d: np.ndarray, losses: np.ndarray, weights: np.ndarray, centers: np.ndarray, noise: float
) -> np.ndarray:
    """Best laws (draws, 5) for losses and weights (draws, rungs), and centres of the prior (draws, 2)."""
    size = max(1, BATCH // (GRID**2 * len(n)))
    batches = [slice(start, start + size) for start in range(0, len(losses), size)]
    return np.concatenate(
        [_solve_batch(n, d, losses[each], weights[each], centers[each], noise) for each in batches]
    )


def _solve_batch(
    n: np.ndarray, d: np.ndarray, losses: np.ndarray, weights: np.ndarray, centers: np.ndarray, noise: float
) -> np.ndarray:
    axis, draws = np.geomspace(LOWEST, HIGHEST, GRID), np.arange(len(losses))
    points, ratio = _pairs(axis)[None], axis[1] / axis[0]  # points of the grid: (1 or draws, points, 2)
    for _ in range(4):
        coefficients, cost = _project(n, d, losses[:, None], weights[:, None], points, noise)
        cost = cost + 0.5 * (((points - centers[:, None]) / SPREAD) ** 2).sum(-1)
        chosen = cost.argmin(1)
        best = np.broadcast_to(points, (*cost.shape, 2))[draws, chosen]
        found = np.concatenate((coefficients[:, draws, chosen].T, best), 1)
        around = _pairs(ratio ** np.linspace(-1, 1, FINE))
        points, ratio = (around * best[:, None]).clip(LOWEST, HIGHEST), ratio ** (2 / (FINE - 1))
    return found


def _pairs(values: np.ndarray) -> np.ndarray:
    """All pairs of values: (values², 2)."""
    return np.stack(np.meshgrid(values, values, indexing="ij"), -1).reshape(-1, 2)


def _project(
    n: np.ndarray, d: np.ndarray, y: np.ndarray, w: np.ndarray, points: np.ndarray, noise: float
) -> tuple[np.ndarray, np.ndarray]:
    """Best E, A, B (3, draws, points) for each pair of exponents, and their costs (draws, points).

    Args:
        y, w: losses and weights (draws, 1, rungs).
        points: exponents (1 or draws, points, 2).
    """
    features = n ** -points[..., :1], d ** -points[..., 1:]  # (1 or draws, points, rungs), besides 1
    # A relative error is that of the logarithm to first order.
    relative = np.stack(np.broadcast_arrays(1 / y, *(feature / y for feature in features)))
    robust: np.ndarray | float = 1.0
    for _ in range(4):
        coefficients = _non_negative(relative, w * robust)
        e, a, b = coefficients[..., None]
        predicted = e + a * features[0] + b * features[1]
        residuals = np.abs(np.log(np.maximum(predicted, 1e-9) / y)) / noise
        robust = np.minimum(1, HUBER / np.maximum(residuals, 1e-12))
    huber = np.where(residuals <= HUBER, 0.5 * residuals**2, HUBER * (residuals - 0.5 * HUBER))
    return coefficients, (w * huber).sum(-1)


def _non_negative(features: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Non-negative least squares of Σ_c x_c·features = 1, where features are (3, ..., rungs).

    The best over all subsets of coefficients, (3, ...).
    """
    weighted = features * weights
    gram = np.einsum("c...r,k...r->ck...", weighted, features)
    right = weighted.sum(-1)
    best, lowest = np.zeros(right.shape), np.zeros(right.shape[1:])
    for subset in SUBSETS:
        index = list(subset)
        found = _eliminate(gram[index][:, index], right[index])
        # the sum of squares without its constant part
        value = -(found * right[index]).sum(0)
        better = (found >= 0).all(0) & (value < lowest)
        lowest = np.where(better, value, lowest)
        full = np.zeros(right.shape)
        full[index] = found
        best = np.where(better, full, best)
    return best


def _eliminate(gram: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Solve positive definite systems (size, size, ...) by Gauss-Jordan; returns (size, ...)."""
    size = len(right)
    rows = np.concatenate((gram, right[:, None]), 1)
    rows[range(size), range(size)] += 1e-12 * np.trace(gram)  # of features that are hardly different
    for pivot in range(size):
        rows[pivot] /= rows[pivot, pivot].copy()
        for other in set(range(size)) - {pivot}:
            rows[other] -= rows[other, pivot].copy() * rows[pivot]
    return rows[:, -1]
