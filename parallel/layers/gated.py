"""Activation of a gated MLP, silu(gate) · up: one exponential instead of two in eager mode on CPUs.

With s = sigmoid(x): silu(x) = x · s, and its derivative is s + silu(x) · (1 - s), an interpolation between silu(x) and 1. Saving
s in place of silu(gate) takes no memory, and saves the exponential of backward. The gradients of both halves are written to one
tensor; autograd would concatenate them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from parallel.host_products import runs_on_host


def silu_gated(gate_up: Tensor) -> Tensor:
    """silu(gate) · up (tokens, f) of [gate, up] (tokens, 2f)."""
    if runs_on_host(gate_up) and gate_up.dtype == torch.float32:
        return _SiluGated.apply(gate_up)
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def silu_slope(x: Tensor) -> tuple[Tensor, Tensor]:
    """silu(x) and its derivative."""
    sigmoid = x.sigmoid()
    active = x * sigmoid
    return active, torch.lerp(active, active.new_ones(()), sigmoid)


class _SiluGated(Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        sigmoid = gate.sigmoid()
        ctx.save_for_backward(gate_up, sigmoid)
        return (gate * sigmoid).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        gate_up, sigmoid = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        result = torch.empty_like(gate_up)
        of_gate, of_up = result.chunk(2, -1)
        active = gate * sigmoid
        torch.mul(grad, active, out=of_up)
        slope = torch.lerp(active, active.new_ones(()), sigmoid, out=active)
        torch.mul(slope.mul_(up), grad, out=of_gate)
        return result
