"""Replay shares: a continual round's old and new loss as functions of its share, and the best share.

The laws, for a share r of replayed tokens, with bootstrap and noise as in mixture.py, whose fit they use:

    old(r) = c + A · (1 + r / w)^-γ        new(r) = c + A · exp(b · r)        c ≥ 0

Forgetting is steepest near 0: the power of the share, offset from 0, is that of arXiv 2406.01375 for the loss on the text of
which a round reads less. The width w, on which little depends, is the one of a grid with the smallest residuals.

The proposed share has the lowest weighted mean of both losses among those at which the old loss rises by at most a limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from modeling.scaling.mixture import DRAWS, MixtureLaws, fit

WIDTHS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
STEP = 0.005  # of proposed shares
LEAST = 4  # shares that a fit needs


@dataclass(frozen=True)
class ShareLaws:
    """Fitted laws of the old and the new loss, and of b bootstrap draws.

    Attributes:
        width: w of the old loss.
    """

    old: MixtureLaws
    new: MixtureLaws
    width: float

    def losses(self, share: float) -> np.ndarray:
        """Old and new loss (2) in nats per token."""
        return np.concatenate([law.losses(point) for law, point in self._laws_at(share)])

    def drawn(self, share: float) -> np.ndarray:
        """Old and new loss (b, 2) by the laws of the draws."""
        return np.hstack([law.drawn(point) for law, point in self._laws_at(share)])

    def outcomes(self, share: float) -> np.ndarray:
        """Losses (b, 2) that one run with this share may have: those of the draws, with the noise of a run."""
        laws = enumerate(self._laws_at(share))
        return np.hstack([law.outcomes(point, seed) for seed, (law, point) in laws])

    def _laws_at(self, share: float) -> list[tuple[MixtureLaws, np.ndarray]]:
        """Both laws, each with its coordinates (2)."""
        shares = np.array([share])
        return [(self.old, _of_old(shares, self.width)[0]), (self.new, _of_new(shares)[0])]


@dataclass(frozen=True)
class Proposal:
    """The best share, and those of the bootstrap draws.

    Attributes:
        meets: whether the old loss is forecast to rise by at most the limit; if not, the share has the lowest old loss.
        draws: best share of each draw, (b).
    """

    share: float
    meets: bool
    draws: np.ndarray


def fit_shares(shares: Sequence[float], losses: np.ndarray, draws: int = DRAWS) -> ShareLaws:
    """Fit the laws to proxies' shares (n) and their old and new losses (n, 2). Deterministic.

    Raises:
        ValueError: fewer than four different shares, or a loss that is not positive.
    """
    given, losses = np.asarray(shares, float), np.asarray(losses, float)
    if len(set(given.tolist())) < LEAST:
        raise ValueError(f"{len(set(given.tolist()))} shares are too few; the fit needs at least {LEAST}")
    old, new = losses[:, :1], losses[:, 1:]

    def residual(width: float) -> float:
        points = _of_old(given, width)
        law = fit(points, old, 0, 1)
        found = [law.losses(point)[0] for point in points]
        return float(np.sum(np.log(found / old[:, 0]) ** 2))

    width = min(WIDTHS, key=residual)
    return ShareLaws(fit(_of_old(given, width), old, 0, draws), fit(_of_new(given), new, 1, draws), width)


def propose_share(
    laws: ShareLaws, before: float, limit: float, weights: tuple[float, float], highest: float
) -> Proposal:
    """The share from 0 to `highest` with the lowest mean of old and new loss that does not forget.

    Args:
        before: old loss without the round.
        limit: by which the old loss may rise.
        weights: of the old and the new loss in the mean.
    """
    grid = np.linspace(0, highest, round(highest / STEP) + 1)
    drawn = np.array([laws.drawn(share) for share in grid])  # (m, b, 2)
    mean = drawn.mean(1)  # (m, 2)
    each = np.array([grid[_best(drawn[:, k], before + limit, weights)] for k in range(drawn.shape[1])])
    chosen = _best(mean, before + limit, weights)
    return Proposal(round(float(grid[chosen]), 4), bool(mean[chosen, 0] <= before + limit), each)


def _best(losses: np.ndarray, most: float, weights: tuple[float, float]) -> int:
    """Number of the share with the lowest mean loss, of those with an old loss up to `most`.

    Shapes: losses (m, 2).
    """
    allowed = losses[:, 0] <= most
    if not allowed.any():
        return int(losses[:, 0].argmin())
    return int(np.where(allowed, losses @ np.array(weights), np.inf).argmin())


def _of_old(shares: np.ndarray, width: float) -> np.ndarray:
    """Coordinates (n, 2) in which the old loss is a mixture law: log(1 + r / w), from 0 to 1."""
    position = np.log1p(shares / width) / np.log1p(1 / width)
    return np.column_stack([position, 1 - position])


def _of_new(shares: np.ndarray) -> np.ndarray:
    """Coordinates (n, 2) in which the new loss is a mixture law: the share itself."""
    return np.column_stack([shares, 1 - shares])
