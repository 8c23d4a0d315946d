"""Deferred weight gradients of linear layers: a separate pass that runs while a pipeline would idle.

A compiled block is one autograd node, whose backward computes all gradients together. A layer that defers its weight gradient
leaves the weight out of autograd: it keeps X, and an extra input of Y's shape, without memory, receives dY. The later pass
computes dW = dYᵀ X and hands it to autograd, so that hooks on the weight run (arXiv 2401.10241). Gradients of biases and norms
are not deferred.

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
from parallel.backward import divert_gradient
from parallel.layers.products import Products, is_plain, linear
from parallel.mesh import Axis
from parallel.random import Keys


def weight_gradient(
    x: Tensor, grad: Tensor, axis: Axis | None, gathers_output: bool, products: Products, mask: Tensor | None
) -> Tensor:
    """dW of a linear layer from X and dY.

    Args:
        axis: with sequence parallelism the tensor axis, over which X or dY is gathered; else None.
        gathers_output: whether to gather dY rather than X.
        mask: factor of dW; None: 1.
    """
    if axis is not None:
        gathered = collectives.all_gather(grad if gathers_output else x, axis)
        x, grad = (x, gathered) if gathers_output else (gathered, grad)
    gradient = products.weight_gradient(grad, x)
    return gradient if mask is None else gradient * mask


class DeferrableLinear(nn.Module):
    """A column- or row-parallel layer, whose weight gradient may be deferred to a separate pass.

    Attributes:
        mask: factor of the weight, 1 or 0; None: 1.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    mask: Tensor | None
    scatters = False  # whether sequence parallelism scatters the output, rather than gathering the input
    weight_gradient = staticmethod(weight_gradient)  # or a compiled version of it
    receiver: Tensor | None = None  # has the shape of Y; None: the gradient is not deferred
    output: Tensor | None = None  # the receiver in the current forward pass
    kept: Tensor | None = None  # X of the last forward pass
    received: Tensor | None = None  # dY of the last backward pass

    def __init__(self, axis: Axis, sequence_parallel: bool, products: Products) -> None:
        super().__init__()
        self.axis, self.products, self.bias = axis, products, None
        self.sequence_parallel = sequence_parallel and axis.size > 1
        self.register_buffer("mask", None, persistent=False)

    def forward(self, x: Tensor, keys: Keys | None = None) -> Tensor:
        """Y; `keys` are for the dropout of an attached update (lora.py)."""
        self._check_input(x)
        weight, output = self.autograd_inputs(x)
        if output is None and is_plain(self.products, self.axis):
            return linear(x, weight, self.bias)
        return self.multiply(x, weight, output)

    def multiply(self, x: Tensor, weight: Tensor, output: Tensor | None) -> Tensor:
        """Y by a Function; `output` receives dY if the weight's gradient is deferred."""
        raise NotImplementedError

    def _check_input(self, x: Tensor) -> None:
        """Raise ValueError, before any collective, unless x is (tokens, width) in the weight's dtype."""
        name, width = type(self).__name__, self.weight.shape[1]
        if x.shape[-1] != width or x.dim() != 2:
            raise ValueError(f"{name}: input has shape {tuple(x.shape)}, expected (tokens, {width})")
        if x.dtype != self.weight.dtype:
            raise ValueError(f"{name}: input is {x.dtype}, expected {self.weight.dtype} like the weight")

    def defer(self, tokens: int) -> None:
        """Defer the weight's gradient, if it is trained, in forward passes of this many tokens."""
        if self.weight.requires_grad:
            rows = tokens // self.axis.size if self.scatters and self.sequence_parallel else tokens
            zero = torch.zeros((), dtype=self.weight.dtype, device=self.weight.device)
            self.output = self.receiver = zero.expand(rows, len(self.weight)).requires_grad_()

    def autograd_inputs(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The weight, and the tensor that receives dY if the weight's gradient is deferred."""
        if self.output is None or not torch.is_grad_enabled():
            return self.weight if self.mask is None else self.weight * self.mask, None
        self.kept = x.detach()
        return self.weight.detach(), self.output

    def deferred_gradient(self, x: Tensor, grad: Tensor) -> Tensor:
        """dW from the kept X and the received dY."""
        axis = self.axis if self.sequence_parallel else None
        return self.weight_gradient(x, grad, axis, self.scatters, self.products, self.mask)


class DeferredGradients:
    """The deferred weight gradients of a stage, by microbatch in the order of their forward passes."""

    def __init__(self, stage: nn.Module) -> None:
        found = (module for module in stage.modules() if isinstance(module, DeferrableLinear))
        self.layers = [layer for layer in found if layer.receiver is not None]
        self._kept: deque[list[Tensor | None]] = deque()

    def begin(self) -> None:
        """Prepare the layers to receive dY of the next microbatch."""
        for layer in self.layers:
            if layer.receiver is None:
                continue
            # As the `grad` of a leaf, dY would be copied to the leaf's strides.
            layer.output = divert_gradient(layer.receiver, partial(setattr, layer, "received"))

    def keep(self) -> None:
        """Record what the layers kept; call it after each forward pass of training."""
        self._kept.append([layer.kept for layer in self.layers])
        for layer in self.layers:
            layer.kept, layer.output = None, layer.receiver

    def take(self) -> Callable[[], None]:
        """Return the pass that accumulates weight gradients of the microbatch whose backward has just run."""
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


class _Compute(Function):
    """Empty result whose backward computes a weight's gradient, which autograd owns and does not copy."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, compute: Callable[[], Tensor]) -> Tensor:
        ctx.compute = compute
        return weight.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.compute(), None
