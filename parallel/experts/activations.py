"""Activations of gated experts, and their gradients: the grouped operator differentiates by hand.

Input is [gate, up] (rows, 2·f), output (rows, f).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

CLAMP, ALPHA = 7.0, 1.702  # of GPT-OSS


class Activation(NamedTuple):
    """`forward(gate_up)`; `backward(gradient of the output, gate_up)` returns the gradient of [gate, up]."""

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


def _silu(gate_up: Tensor) -> Tensor:
    """silu(gate) · up."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def _silu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return torch.cat((torch.ops.aten.silu_backward(grad * up, gate), grad * F.silu(gate)), -1)


def _gelu(gate_up: Tensor) -> Tensor:
    """gelu(gate) · up."""
    gate, up = gate_up.chunk(2, -1)
    return F.gelu(gate) * up


def _gelu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return torch.cat((torch.ops.aten.gelu_backward(grad * up, gate), grad * F.gelu(gate)), -1)


def _clamped(gate_up: Tensor) -> Tensor:
    """g·sigmoid(α g) · (u + 1), with g = min(gate, 7) and u = up clamped to ±7 (GPT-OSS)."""
    gate, up = gate_up.chunk(2, -1)
    gate, up = gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP)
    return gate * torch.sigmoid(ALPHA * gate) * (up + 1)


def _clamped_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    inside_gate, inside_up = gate <= CLAMP, up.abs() <= CLAMP
    gate, up = gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP)
    sigmoid = torch.sigmoid(ALPHA * gate)
    slope = sigmoid * (1 + ALPHA * gate * (1 - sigmoid))
    grad_gate = grad * (up + 1) * slope * inside_gate
    return torch.cat((grad_gate, grad * gate * sigmoid * inside_up), -1)


ACTIVATIONS = {
    "silu": Activation(_silu, _silu_backward),
    "gelu": Activation(_gelu, _gelu_backward),
    "clamped_silu": Activation(_clamped, _clamped_backward),
}
