"""Whole logits on every tensor rank, for losses and metrics that are not the library's own.

    z = X Wᵀ, (tokens, v) float32

W's rows are split over the tensor axis, and each rank's columns of z are gathered. What follows is then done alike on every
rank, so in backward each takes its own columns of the gradient. Cost: tokens × v × 4 bytes, received and held on every rank;
`linear_cross_entropy` needs a chunk of v/t of that.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from parallel import collectives
from parallel.mesh import Axis


class _GatherAlike(Function):
    """(p, ...) -> (n·p, ...), used alike by every rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return collectives.all_gather(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return collectives.own_piece(grad.contiguous(), ctx.axis).clone(), None


def full_logits(
    x: Tensor, weight: Tensor, axis: Axis, *, vocabulary: int, sequence_parallel: bool = False
) -> Tensor:
    """The output projection's logits (b·s, v) in float32, the same on every rank of the axis.

    Args:
        x: (b·s, h), or (b·s/t, h) with sequence parallelism.
        weight: (ceil(v/t), h), this rank's rows.
        axis: the tensor axis.
        vocabulary: v, unpadded.
    """
    x = collectives.gather(x, axis) if sequence_parallel else collectives.copy(x, axis)  # (b·s, h)
    own = F.linear(x, weight).float().t().contiguous()  # (ceil(v/t), b·s)
    return _GatherAlike.apply(own, axis)[:vocabulary].t()  # (b·s, v)
