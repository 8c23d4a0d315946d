"""Experts one after the other: each goes from its rows to its outputs, or to its gradients, before the next begins.

For devices without a kernel for grouped products. What an expert computes between its products (rows of 2f elements) is small
enough for a CPU's cache, where the same for all experts would be read from memory again by each of a dozen operations.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from parallel.experts.activations import Activation

BASE = 4  # number of parameters before those of updates, which train while these are frozen


class Parameters(NamedTuple):
    """Of a rank's experts; the factors of LoRA's updates last, of which the second ones are scaled."""

    gate_up: Tensor  # (experts, 2f, h)
    down: Tensor  # (experts, h, f)
    gate_up_bias: Tensor | None = None  # (experts, 2f)
    down_bias: Tensor | None = None  # (experts, h)
    gate_up_a: Tensor | None = None  # (experts, r, h)
    gate_up_b: Tensor | None = None  # (experts, 2f, r)
    down_a: Tensor | None = None  # (experts, r, f)
    down_b: Tensor | None = None  # (experts, h, r)

    def factors(self) -> list[Tensor]:
        """The matrices that rows are multiplied by."""
        matrices = (self.gate_up, self.down, self.gate_up_a, self.gate_up_b, self.down_a, self.down_b)
        return [matrix for matrix in matrices if matrix is not None]


class Saved(NamedTuple):
    """What backward starts from."""

    rows: Tensor  # (m, h), grouped by expert
    grads: Tensor  # (m, h), of the tokens' outputs
    scales: Tensor  # (m), weight of each row in its token's output
    hidden: Tensor | None  # (m, 2f), [gate, up]; None: computed again


def forward(
    rows: Tensor, parameters: Parameters, ranges: Iterable[tuple[int, int]], act: Activation
) -> tuple[Tensor, Tensor]:
    """[gate, up] (m, 2f) and the outputs (m, h) of rows (m, h) grouped by expert.

    Args:
        ranges: first row of each expert and one past its last.
    """
    p = parameters
    hidden, out = rows.new_empty(len(rows), p.gate_up.shape[1]), rows.new_empty(rows.shape)
    for expert, (start, stop) in enumerate(ranges):
        own = slice(start, stop)
        _linear(rows[own], expert, hidden[own], p.gate_up, p.gate_up_bias, p.gate_up_a, p.gate_up_b)
        _linear(act.forward(hidden[own]), expert, out[own], p.down, p.down_bias, p.down_a, p.down_b)
    return hidden, out


def backward(
    saved: Saved, parameters: Parameters, ranges: Iterable[tuple[int, int]], act: Activation, frozen: bool
) -> tuple[Tensor | None, ...]:
    """Gradients of the rows (m, h), of their scales (m), and of the parameters, None for those that do not exist.

    Args:
        frozen: whether weights and biases need no gradients; they are None, too.
    """
    rows, grads, scales, hidden = saved
    gate_up, down, gate_up_bias, down_bias, gate_up_a, gate_up_b, down_a, down_b = parameters
    of_rows, of_scales = rows.new_empty(rows.shape), rows.new_empty(len(rows), dtype=torch.float32)
    needed = [
        None if parameter is None or (frozen and index < BASE) else torch.empty_like(parameter)
        for index, parameter in enumerate(parameters)
    ]
    found = Parameters(*needed)
    for expert, (start, stop) in enumerate(ranges):
        x, grad, scale = (each[start:stop] for each in (rows, grads, scales[:, None]))
        if hidden is None:
            pre = x.new_empty(len(x), gate_up.shape[1])
            _linear(x, expert, pre, gate_up, gate_up_bias, gate_up_a, gate_up_b)
        else:
            pre = hidden[start:stop]  # (m_e, 2f)
        out = act.forward(pre)  # (m_e, f)
        grad_act = grad @ down[expert]  # (m_e, f), not scaled
        if down_b is not None:
            low = grad @ down_b[expert]  # (m_e, r), not scaled
            grad_act.addmm_(low, down_a[expert])
        # The gradient of a scale, <grad, output>, without computing the output again.
        torch.sum(grad_act * out, 1, dtype=torch.float32, out=of_scales[start:stop])
        if down_bias is not None:
            of_scales[start:stop] += (grad * down_bias[expert]).sum(1, dtype=torch.float32)
        if found.down_bias is not None:
            found.down_bias[expert] = (grad * scale).sum(0, dtype=torch.float32)
        out.mul_(scale)
        if found.down is not None:
            torch.mm(grad.t(), out, out=found.down[expert])
        if found.down_b is not None:
            torch.mm(grad.t(), out @ down_a[expert].t(), out=found.down_b[expert])
            torch.mm(low.t(), out, out=found.down_a[expert])
        grad_pre = act.backward(grad_act.mul_(scale), pre)  # (m_e, 2f)
        if found.gate_up_bias is not None:
            found.gate_up_bias[expert] = grad_pre.sum(0, dtype=torch.float32)
        if found.gate_up is not None:
            torch.mm(grad_pre.t(), x, out=found.gate_up[expert])
        torch.mm(grad_pre, gate_up[expert], out=of_rows[start:stop])
        if found.gate_up_b is not None:
            low = grad_pre @ gate_up_b[expert]  # (m_e, r)
            of_rows[start:stop].addmm_(low, gate_up_a[expert])
            torch.mm(grad_pre.t(), x @ gate_up_a[expert].t(), out=found.gate_up_b[expert])
            torch.mm(low.t(), x, out=found.gate_up_a[expert])
    return of_rows, of_scales, *found


def _linear(
    rows: Tensor,
    expert: int,
    out: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    a: Tensor | None,
    b: Tensor | None,
) -> None:
    """Write rows · (weight + b a)ᵀ + bias of an expert into `out`."""
    if bias is None:
        torch.mm(rows, weight[expert].t(), out=out)
    else:
        torch.addmm(bias[expert], rows, weight[expert].t(), out=out)
    if a is not None:
        out.addmm_(rows @ a[expert].t(), b[expert].t())
