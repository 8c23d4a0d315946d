"""Parallel layers as functions from whole tensors to whole tensors, equal on all ranks, so that gradcheck applies.

Every rank runs the same gradcheck in step with the others: inputs are moved by the same amounts everywhere, each rank takes its
piece of them, and outputs are put together again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, gradcheck

from parallel import collectives
from parallel.mesh import Axis


class _Piece(Function):
    """(p·n/m, ...) on all ranks -> the piece of this rank, which m neighbours share and have the same gradient of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, replicas: int) -> Tensor:
        ctx.axis, ctx.replicas = axis, replicas
        return x.unflatten(0, (axis.size // replicas, -1))[axis.rank // replicas].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        every = collectives.all_gather(grad, ctx.axis).unflatten(0, (ctx.axis.size, -1))
        return every[:: ctx.replicas].flatten(0, 1), None, None


class _Whole(Function):
    """(p, ...) of each rank -> (p·n, ...) on all; a rank's gradient is that of its own piece."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return collectives.all_gather(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.unflatten(0, (ctx.axis.size, -1))[ctx.axis.rank].clone(), None


def piece(x: Tensor, axis: Axis, dim: int = 0, replicas: int = 1) -> Tensor:
    """This rank's piece of a whole tensor, along a dim."""
    return _Piece.apply(x.movedim(dim, 0).contiguous(), axis, replicas).movedim(0, dim)


def whole(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """The pieces of all ranks, along a dim."""
    return _Whole.apply(x.movedim(dim, 0).contiguous(), axis).movedim(0, dim)


def check(function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> bool:
    """gradcheck in float64 of a function of whole tensors, with random ones of these shapes."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return gradcheck(function, [x.requires_grad_() for x in inputs])
