"""Newton–Schulz iteration: the orthogonal matrix nearest to a matrix, by matrix products only.

For X = U S Vᵀ with its norm scaled to 1, each step applies an odd polynomial to the singular values:

    A = X Xᵀ;   X = a X + (b A + c A²) X

FLOPs of a step for r rows and c columns, m = min(r, c), n = max(r, c): 4 m² n + 2 m³. X is transposed if it has more rows than
columns.

    published        one polynomial for five steps, of the largest slope at zero (Jordan, kellerjordan.github.io/posts/muon; also
                     arXiv 2502.16982); singular values end between 0.7 and 1.2
    polar_express    another polynomial for each of the five, the best for the interval that the singular values are in by then
                     (arXiv 2505.16932); nearer to 1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

EPSILON = 1e-7
SAFETY = 1.01  # of Polar Express: rounding may leave singular values slightly above 1
Polynomial = tuple[float, float, float]


@dataclass(frozen=True)
class Coefficients:
    """The polynomial (a, b, c) of each step, and a divisor of the matrix besides its norm."""

    steps: tuple[Polynomial, ...]
    divisor: float = 1.0


_POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
)
COEFFICIENTS = {
    "published": Coefficients(((3.4445, -4.7750, 2.0315),) * 5),
    "polar_express": Coefficients(
        tuple((a / SAFETY, b / SAFETY**3, c / SAFETY**5) for a, b, c in _POLAR_EXPRESS), SAFETY
    ),
}


def orthogonalize(matrices: Tensor, coefficients: Coefficients) -> Tensor:
    """The orthogonal matrices nearest to one matrix (r, c) or several (n, r, c), in their dtype."""
    x = matrices.mT if matrices.shape[-2] > matrices.shape[-1] else matrices
    norm = matrices.norm(dim=(-2, -1), keepdim=True) if matrices.dim() > 2 else matrices.norm()
    x = x / (norm * coefficients.divisor).clamp(min=EPSILON)
    add_product = torch.addmm if matrices.dim() == 2 else torch.baddbmm
    for a, b, c in coefficients.steps:
        gram = x @ x.mT
        x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if matrices.shape[-2] > matrices.shape[-1] else x


def multiply_adds(shape: Sequence[int], coefficients: Coefficients) -> int:
    """Multiply-adds that orthogonalize a matrix of this shape."""
    small, large = sorted(shape)
    return len(coefficients.steps) * (2 * small**2 * large + small**3)
