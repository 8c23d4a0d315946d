"""AdamW (arXiv 1711.05101) on flat float32 tensors: torch's fused kernel, or a function that can be compiled.

With g the gradient times `scale`, m and v the moments, at step t:

    m = β1 m + (1-β1) g;   v = β2 v + (1-β2) g²;   w = (1 - ηλ) w - η/(1-β1^t) · m / (√v / √(1-β2^t) + ε)

A compiled graph must depend neither on the step's scalars nor on the shard's length: scalars are passed as a tensor, and a shard
is processed in tiles of one size, so that one graph serves every shard on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.device import has_fused_adamw

TILE = 1 << 16  # elements; padding the last tile costs at most a thousandth of a large model's shard

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
    """One in-place AdamW step on flat float32 tensors of equal length.

    Args:
        scale: factor on the gradient, for clipping.
        compiled: compiled `update`, applied tile by tile; None uses torch's fused kernel, or `update` if there is none.
    """
    beta1, beta2 = betas
    if compiled is None and has_fused_adamw(weights.device.type):
        torch._fused_adamw_(
            [weights], [gradient], [exp_avg], [exp_avg_sq], [], [torch.tensor(float(step), device=weights.device)],
            lr=learning_rate, beta1=beta1, beta2=beta2, weight_decay=weight_decay, eps=epsilon,
            amsgrad=False, maximize=False,
            grad_scale=None if scale == 1 else torch.tensor(1 / scale, device=weights.device),
        )  # fmt: skip
        return
    correction2, decay = math.sqrt(1 - beta2**step), 1 - learning_rate * weight_decay
    rate = learning_rate / (1 - beta1**step)
    values = [scale, 1 - beta1, beta2, 1 - beta2, correction2, epsilon, decay, rate]
    scalars = torch.tensor(values, device=weights.device)
    tensors = (weights, gradient, exp_avg, exp_avg_sq)
    if compiled is None:
        update(*tensors, scalars)
        return
    tiled = weights.numel() // TILE * TILE
    for start in range(0, tiled, TILE):
        compiled(*(tensor[start : start + TILE] for tensor in tensors), scalars)
    if tiled < weights.numel():
        rest = [tensor[tiled:] for tensor in tensors]
        padded = [F.pad(tensor, (0, TILE - len(tensor))) for tensor in rest]
        compiled(*padded, scalars)
        for tensor, tile in zip(rest, padded, strict=True):
            tensor.copy_(tile[: len(tensor)])


def update(weights: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, scalars: Tensor) -> None:
    """The AdamW formula, in place; scalars (8): scale, 1-β1, β2, 1-β2, √(1-β2^t), ε, 1-ηλ, η/(1-β1^t)."""
    scale, new1, old2, new2, correction2, epsilon, decay, rate = scalars.unbind()
    gradient = gradient * scale
    exp_avg.add_((gradient - exp_avg) * new1)
    exp_avg_sq.mul_(old2).add_(gradient * gradient * new2)
    root = exp_avg_sq.sqrt() / correction2 + epsilon
    weights.mul_(decay).sub_(exp_avg / root * rate)
