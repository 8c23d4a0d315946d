"""The gradient of a weight that two parts of a model use, summed by a program.

Autograd sums the gradients of both uses by an operator of its own, which a device that compiles each operator would have to
compile. Here the gradient that comes first in backward is kept, and a hook on the weight adds it to the other one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function


class TiedWeight:
    """A trained weight whose last use in forward is by `use`; another use of it in the same forward comes earlier.

    Args:
        weight: a parameter that requires a gradient.
        add: compiled `add`.
    """

    def __init__(self, weight: nn.Parameter, add: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.weight, self.add = weight, add
        self.kept: Tensor | None = None
        weight.register_hook(self._sum)

    def use(self) -> Tensor:
        """The weight for its last use; the gradient of this use reaches the weight with that of the other."""
        trains = torch.is_grad_enabled() and self.weight.requires_grad
        return _Keep.apply(self.weight, self) if trains else self.weight

    def _sum(self, gradient: Tensor) -> Tensor:
        kept, self.kept = self.kept, None
        return gradient if kept is None else self.add(gradient, kept)


class _Keep(Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, tied: TiedWeight) -> Tensor:
        ctx.tied = tied
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        ctx.tied.kept = gradient
        return None, None


def add(gradient: Tensor, other: Tensor) -> Tensor:
    """The sum of two gradients."""
    return gradient + other
