"""Tied weights: sum the gradients of a weight's two uses with a compiled program.

Autograd would sum them with a separate operator, which a device that compiles each operator would have to compile. Here the
gradient that comes first in backward is kept, and a hook on the weight adds it to the other one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from parallel.backward import divert_gradient


class TiedWeight:
    """A trained weight that forward uses twice, the second time by `use`.

    Args:
        weight: a parameter that requires a gradient.
        add: compiled `add`.
    """

    def __init__(self, weight: nn.Parameter, add: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.weight, self.add = weight, add
        self.kept: Tensor | None = None
        weight.register_hook(self._sum)

    def use(self) -> Tensor:
        """The weight for its second use, whose gradient reaches the weight together with that of the first."""
        trains = torch.is_grad_enabled() and self.weight.requires_grad
        return divert_gradient(self.weight, partial(setattr, self, "kept")) if trains else self.weight

    def _sum(self, gradient: Tensor) -> Tensor:
        kept, self.kept = self.kept, None
        return gradient if kept is None else self.add(gradient, kept)


def add(gradient: Tensor, other: Tensor) -> Tensor:
    """The sum of two gradients."""
    return gradient + other
