"""Parallel layers as functions of full, replicated tensors, so that gradcheck applies.

All ranks run the same gradcheck in step: they perturb inputs equally, take their shards, and gather the outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, gradcheck

from parallel import collectives
from parallel.mesh import Axis


class _Shard(Function):
    """(p·n/m, ...) on all ranks -> this rank's shard, which m neighbours share with equal gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, replicas: int) -> Tensor:
        ctx.axis, ctx.replicas = axis, replicas
        return x.unflatten(0, (axis.size // replicas, -1))[axis.rank // replicas].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        every = collectives.all_gather(grad, ctx.axis).unflatten(0, (ctx.axis.size, -1))
        return every[:: ctx.replicas].flatten(0, 1), None, None


class _Gather(Function):
    """(p, ...) of each rank -> (p·n, ...) on all; a rank's gradient is that of its shard."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return collectives.all_gather(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.unflatten(0, (ctx.axis.size, -1))[ctx.axis.rank].clone(), None


def shard(x: Tensor, axis: Axis, dim: int = 0, replicas: int = 1) -> Tensor:
    """This rank's shard of a replicated tensor, along a dim."""
    return _Shard.apply(x.movedim(dim, 0).contiguous(), axis, replicas).movedim(0, dim)


def gather(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Concatenate all ranks' shards along a dim."""
    return _Gather.apply(x.movedim(dim, 0).contiguous(), axis).movedim(0, dim)


def check(function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> bool:
    """gradcheck in float64 of a function of full tensors, with random inputs of these shapes."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return gradcheck(function, [x.requires_grad_() for x in inputs])
