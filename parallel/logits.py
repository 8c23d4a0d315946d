"""Full logits on every tensor rank, for user-defined losses and metrics.

    z = X Wᵀ, (tokens, v) float32

W's rows are split over the tensor axis, and each rank gathers the others' columns of z. All ranks then compute the same loss, so
in backward each takes its own columns of the gradient. Cost: tokens × v × 4 bytes, received and held on every rank;
`linear_cross_entropy` needs only v/t columns of one chunk of tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel import collectives
from parallel.mesh import Axis

# All-gather whose result, and so its gradient, is used identically on every rank.
_gather_replicated = collectives.differentiable(
    collectives.all_gather, lambda grad, axis: collectives.local_shard(grad.contiguous(), axis).clone()
)


def full_logits(
    x: Tensor,
    weight: Tensor,
    axis: Axis,
    *,
    vocabulary: int,
    sequence_parallel: bool = False,
    soft_cap: float | None = None,
) -> Tensor:
    """Logits of the output projection (b·s, v) in float32, the same on every rank of the axis.

    Args:
        x: (b·s, h), or (b·s/t, h) with sequence parallelism.
        weight: (ceil(v/t), h), this rank's rows.
        axis: tensor axis.
        vocabulary: v, unpadded.
        soft_cap: c, for logits c · tanh(z / c); None: none.
    """
    x = collectives.gather(x, axis) if sequence_parallel else collectives.copy(x, axis)  # (b·s, h)
    columns = soft_capped(F.linear(x, weight).float(), soft_cap).t().contiguous()  # (ceil(v/t), b·s)
    return _gather_replicated(columns, axis)[:vocabulary].t()  # (b·s, v)


def soft_capped(logits: Tensor, soft_cap: float | None) -> Tensor:
    """Logits with a soft cap, c · tanh(z / c); the same if it is None."""
    return logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)
