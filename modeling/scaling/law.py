"""Chinchilla's scaling law L(N, D) = E + A/N^α + B/D^β, and the optimum for a budget.

The law is that of arXiv 2203.15556, approach 3. N is the number of multiply-adds per token of a forward pass, including head and
attention (`flops_per_token / 6`), as in DeepSeek LLM (arXiv 2401.02954): about the number of parameters without the embedding for
large models, and C = 6·N·D holds at any size. D is the number of training tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Law:
    """The law's coefficients; N and D are in units of `scale`, so A and B have a loss's magnitude."""

    irreducible: float  # E, nats per token
    size: float  # A
    data: float  # B
    alpha: float
    beta: float
    scale: tuple[float, float]  # units of N and D

    def loss(self, n: np.ndarray | float, d: np.ndarray | float) -> np.ndarray:
        """Loss in nats per token of models with n multiply-adds per token, trained on d tokens."""
        unit_n, unit_d = self.scale
        return (
            self.irreducible
            + self.size * (np.asarray(n, float) / unit_n) ** -self.alpha
            + self.data * (np.asarray(d, float) / unit_d) ** -self.beta
        )

    def optimum(self, flops: float) -> tuple[float, float]:
        """(N, D) of the lowest loss for a budget of FLOPs: where α·A/N^α = β·B/D^β and 6·N·D is the budget.

        Raises ValueError if the rungs showed no effect of size or of data, so that there is no optimum.
        """
        if not (self.size and self.data):
            missing = "size" if not self.size else "data"
            raise ValueError(f"the fit has no term in {missing}, so no size is optimal; add rungs")
        unit_n, unit_d = self.scale
        product = flops / 6 / unit_n / unit_d  # N·D in the law's units
        ratio = self.alpha * self.size / (self.beta * self.data)
        n = (ratio * product**self.beta) ** (1 / (self.alpha + self.beta))
        return n * unit_n, product / n * unit_d
