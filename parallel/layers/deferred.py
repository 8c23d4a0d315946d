"""Weight gradients of linear layers as a pass of their own, for schedules that run it when a pipeline would idle.

A compiled block is one node of autograd, whose backward computes all gradients together. A layer that defers its weight's
gradient leaves the weight out of autograd: it keeps X, and an input in the shape of Y, without memory, receives dY. The later
pass computes dW = dYᵀ X and hands it to autograd, so that hooks on the weight run (arXiv 2401.10241). Gradients of biases and
norms are not deferred.

Memory between the passes: X and dY of each layer, per microbatch. Neither they nor dW are copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from parallel import collectives
from parallel.layers.products import Products
from parallel.mesh import Axis


def weight_gradient(
    x: Tensor, grad: Tensor, axis: Axis | None, gathers_output: bool, products: Products
) -> Tensor:
    """dW of a linear layer's X and dY.

    Args:
        axis: with sequence parallelism the tensor axis, over which one of them is gathered; else None.
        gathers_output: whether that is dY, and not X.
    """
    if axis is not None:
        whole = collectives.all_gather(grad if gathers_output else x, axis)
        x, grad = (x, whole) if gathers_output else (whole, grad)
    return products.weight_gradient(grad, x)


class DeferrableLinear(nn.Module):
    """A linear layer whose weight's gradient may be computed by a pass of its own."""

    weight: nn.Parameter
    axis: Axis
    sequence_parallel: bool
    products: Products
    scatters = False  # whether sequence parallelism scatters the output, and not the input
    weight_gradient = staticmethod(weight_gradient)  # or a compiled version of it
    receiver: Tensor | None = None  # in the shape of Y; None: the gradient is not deferred
    output: Tensor | None = None  # the receiver in the current forward pass
    kept: Tensor | None = None  # X of the last forward pass
    received: Tensor | None = None  # dY of the last backward pass

    def defer(self, tokens: int) -> None:
        """Defer the gradient of the weight, if it is trained, in forward passes of this many tokens."""
        if self.weight.requires_grad:
            rows = tokens // self.axis.size if self.scatters and self.sequence_parallel else tokens
            zero = torch.zeros((), dtype=self.weight.dtype, device=self.weight.device)
            self.output = self.receiver = zero.expand(rows, len(self.weight)).requires_grad_()

    def autograd_inputs(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The weight, and what receives dY if the weight's gradient is deferred."""
        if self.output is None or not torch.is_grad_enabled():
            return self.weight, None
        self.kept = x.detach()
        return self.weight.detach(), self.output

    def deferred_gradient(self, x: Tensor, grad: Tensor) -> Tensor:
        """dW of kept X and received dY."""
        axis = self.axis if self.sequence_parallel else None
        return self.weight_gradient(x, grad, axis, self.scatters, self.products)


class DeferredGradients:
    """The deferred weight gradients of a stage, by microbatch in the order of their forward passes."""

    def __init__(self, stage: nn.Module) -> None:
        found = (module for module in stage.modules() if isinstance(module, DeferrableLinear))
        self.layers = [layer for layer in found if layer.receiver is not None]
        self._kept: deque[list[Tensor | None]] = deque()

    def begin(self) -> None:
        """Let the layers receive dY of the microbatch whose forward pass follows."""
        for layer in self.layers:
            layer.output = _Receive.apply(layer.receiver, layer)

    def keep(self) -> None:
        """Note what the layers kept; call it after each forward pass of training."""
        self._kept.append([layer.kept for layer in self.layers])
        for layer in self.layers:
            layer.kept, layer.output = None, layer.receiver

    def take(self) -> Callable[[], None]:
        """The pass that accumulates the weights' gradients of the microbatch whose backward pass has just run."""
        calls = []
        for layer, x in zip(self.layers, self._kept.popleft(), strict=True):
            if x is not None and layer.received is not None:
                calls.append((layer.weight, partial(layer.deferred_gradient, x, layer.received)))
                layer.received = None

        def accumulate() -> None:
            while calls:
                passed = _Compute.apply(*calls.pop())
                torch.autograd.backward((passed,), (passed.detach(),))

        return accumulate


class _Receive(Function):
    """Gives dY to the layer; a leaf would copy it, since its own layout is another."""

    @staticmethod
    def forward(ctx: Any, receiver: Tensor, layer: DeferrableLinear) -> Tensor:
        ctx.layer = layer
        return receiver.view_as(receiver)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        ctx.layer.received = grad
        return None, None


class _Compute(Function):
    """A node without elements whose backward pass computes a weight's gradient, which autograd then owns and does not copy."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, compute: Callable[[], Tensor]) -> Tensor:
        ctx.compute = compute
        return weight.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.compute(), None
