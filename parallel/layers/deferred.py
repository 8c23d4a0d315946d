"""Weight gradients of linear layers as a pass of their own, for schedules that run it when a pipeline would idle.

A compiled block is one node of autograd, whose backward computes all gradients together. A layer that defers its weight's
gradient leaves the weight out of autograd: it keeps X, and a leaf in the shape of Y, without memory, receives dY. The later pass
computes dW = dYᵀ X and accumulates it through autograd, so that hooks on the weight run (arXiv 2401.10241). Gradients of biases
and norms are not deferred.

Memory between the passes: X and dY of each layer, per microbatch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from parallel.mesh import Axis


class DeferrableLinear(nn.Module):
    """A linear layer whose weight's gradient may be computed by a pass of its own."""

    weight: nn.Parameter
    axis: Axis
    sequence_parallel: bool
    scatters = False  # whether sequence parallelism scatters the output, and not the input
    output: Tensor | None = None  # leaf that receives dY; None: the gradient is not deferred
    kept: Tensor | None = None  # X of the last forward pass

    def defer(self, tokens: int) -> None:
        """Defer the gradient of the weight, if it is trained, in forward passes of this many tokens."""
        if self.weight.requires_grad:
            rows = tokens // self.axis.size if self.scatters and self.sequence_parallel else tokens
            zero = torch.zeros((), dtype=self.weight.dtype, device=self.weight.device)
            self.output = zero.expand(rows, len(self.weight)).requires_grad_()

    def autograd_inputs(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The weight, and the leaf that receives dY if the weight's gradient is deferred."""
        if self.output is None or not torch.is_grad_enabled():
            return self.weight, None
        self.kept = x.detach()
        return self.weight.detach(), self.output

    def weight_gradient(self, x: Tensor, grad: Tensor) -> Tensor:
        """dW of kept X and received dY."""
        raise NotImplementedError


class DeferredGradients:
    """The deferred weight gradients of a stage, by microbatch in the order of their forward passes."""

    def __init__(self, stage: nn.Module) -> None:
        found = (module for module in stage.modules() if isinstance(module, DeferrableLinear))
        self.layers = [layer for layer in found if layer.output is not None]
        self._kept: deque[list[Tensor | None]] = deque()

    def keep(self) -> None:
        """Note what the layers kept; call it after each forward pass of training."""
        self._kept.append([layer.kept for layer in self.layers])
        for layer in self.layers:
            layer.kept = None

    def take(self) -> Callable[[], None]:
        """The pass that accumulates the weights' gradients of the microbatch whose backward pass has just run."""
        calls = []
        for layer, x in zip(self.layers, self._kept.popleft(), strict=True):
            if x is not None and layer.output.grad is not None:
                calls.append((layer, x, layer.output.grad))
                layer.output.grad = None

        def accumulate() -> None:
            while calls:
                layer, x, grad = calls.pop()
                with torch.no_grad():
                    gradient = layer.weight_gradient(x, grad)
                torch.autograd.backward((layer.weight,), (gradient,))

        return accumulate
