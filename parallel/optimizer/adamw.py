"""AdamW (arXiv 1711.05101) on flat float32 tensors: torch's fused kernel where there is one, else lines that may be compiled.

With g the gradient times `scale`, m and v the moments, at step t:

    m = β1 m + (1-β1) g;   v = β2 v + (1-β2) g²;   w = (1 - ηλ) w - η/(1-β1^t) · m / (√v / √(1-β2^t) + ε)

A graph must depend neither on the step's numbers nor on a shard's length: numbers come in as a tensor, and a shard is walked
through in tiles of one size, so one graph serves every shard of every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.device import has_fused_adamw

TILE = 1 << 16  # elements; a thousandth of a large model's shard, and small enough to round a shard up to

Update = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]


def adamw(
    weights: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: int,
    learning_rate: float,
    betas: tuple[float, float],
    epsilon: float,
    weight_decay: float,
    scale: float,
    compiled: Update | None = None,
) -> None:
    """One AdamW update in place on flat float32 tensors; the gradient counts times `scale`.

    Args:
        compiled: `update`, compiled; used tile by tile where given.
    """
    beta1, beta2 = betas
    if compiled is None and has_fused_adamw(weights):
        torch._fused_adamw_(
            [weights], [gradient], [exp_avg], [exp_avg_sq], [], [torch.tensor(float(step), device=weights.device)],
            lr=learning_rate, beta1=beta1, beta2=beta2, weight_decay=weight_decay, eps=epsilon,
            amsgrad=False, maximize=False,
            grad_scale=None if scale == 1 else torch.tensor(1 / scale, device=weights.device),
        )  # fmt: skip
        return
    numbers = torch.tensor(
        [
            scale,
            1 - beta1,
            beta2,
            1 - beta2,
            math.sqrt(1 - beta2**step),
            epsilon,
            1 - learning_rate * weight_decay,
            learning_rate / (1 - beta1**step),
        ],
        device=weights.device,
    )
    tensors = (weights, gradient, exp_avg, exp_avg_sq)
    if compiled is None:
        update(*tensors, numbers)
        return
    whole = weights.numel() // TILE * TILE
    for start in range(0, whole, TILE):
        compiled(*(tensor[start : start + TILE] for tensor in tensors), numbers)
    if whole < weights.numel():
        rest = [tensor[whole:] for tensor in tensors]
        padded = [F.pad(tensor, (0, TILE - len(tensor))) for tensor in rest]
        compiled(*padded, numbers)
        for tensor, tile in zip(rest, padded, strict=True):
            tensor.copy_(tile[: len(tensor)])


def update(weights: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, numbers: Tensor) -> None:
    """The formula, in place; numbers (8): scale, 1-β1, β2, 1-β2, √(1-β2^t), ε, 1-ηλ, η/(1-β1^t)."""
    scale, new1, old2, new2, correction2, epsilon, kept, rate = numbers.unbind()
    gradient = gradient * scale
    exp_avg.add_((gradient - exp_avg) * new1)
    exp_avg_sq.mul_(old2).add_(gradient * gradient * new2)
    root = exp_avg_sq.sqrt() / correction2 + epsilon
    weights.mul_(kept).sub_(exp_avg / root * rate)
