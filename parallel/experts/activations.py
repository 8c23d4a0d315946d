"""Activations of gated experts and their gradients, for operators with a manual backward.

Input is [gate, up] (rows, 2·f), output (rows, f) = a(gate) · b(up).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.layers.gated import silu_slope

CLAMP, ALPHA = 7.0, 1.702  # of GPT-OSS


class Activation(NamedTuple):
    """`forward(gate_up)` returns the output.

    `backward(grad, gate_up, scale)` is for outputs that are multiplied by `scale` (rows, 1) afterwards. It overwrites `grad`, the
    gradient of the scaled output, and returns

        output        (rows, f), as `forward`
        product       (rows) float32, <grad, output>: the gradient of the scale
        gradient      (rows, 2·f), of [gate, up]
    """

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def _gated(function: Callable[[Tensor], Tensor], derivative: Callable[..., Tensor]) -> Activation:
    """function(gate) · up; `derivative` is the out variant of the function's backward operator."""

    def forward(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return function(gate) * up

    def backward(grad: Tensor, gate_up: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gate, up = gate_up.chunk(2, -1)
        slope = None
        if function is F.silu and gate.dtype == torch.float32:
            active, slope = silu_slope(gate)
        else:
            active = function(gate)
        out = active * up
        product = _scale(grad, out, scale)
        result = torch.empty_like(gate_up)
        grad_gate, grad_up = result.chunk(2, -1)
        torch.mul(grad, active, out=grad_up)
        grad.mul_(up)
        if slope is None:
            derivative(grad, gate, grad_input=grad_gate)
        else:
            torch.mul(grad, slope, out=grad_gate)
        return out, product, result

    return Activation(forward, backward)


def _clamped(gate_up: Tensor) -> Tensor:
    """g·sigmoid(α g) · (u + 1), with g = min(gate, 7) and u = up clamped to ±7 (GPT-OSS)."""
    gate, up = gate_up.chunk(2, -1)
    gate, up = gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP)
    return gate * torch.sigmoid(ALPHA * gate) * (up + 1)


def _clamped_backward(grad: Tensor, gate_up: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    gate, up = gate_up.chunk(2, -1)
    inside_gate, inside_up = gate <= CLAMP, up.abs() <= CLAMP
    gate, up = gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP) + 1
    sigmoid = torch.sigmoid(ALPHA * gate)
    slope = sigmoid * (1 + ALPHA * gate * (1 - sigmoid))
    active = gate * sigmoid
    out = active * up
    product = _scale(grad, out, scale)
    return out, product, torch.cat((grad * up * slope * inside_gate, grad * active * inside_up), -1)


def _scale(grad: Tensor, out: Tensor, scale: Tensor) -> Tensor:
    """Return <grad, out> of each row (rows), float32, and multiply grad by the scale in place."""
    product = (grad * out).sum(1, dtype=torch.float32)
    grad.mul_(scale)
    return product


ACTIVATIONS = {
    "silu": _gated(F.silu, torch.ops.aten.silu_backward.grad_input),
    "gelu": _gated(F.gelu, torch.ops.aten.gelu_backward.grad_input),
    "clamped_silu": Activation(_clamped, _clamped_backward),
}
