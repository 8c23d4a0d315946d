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


class Parameters(NamedTuple):
    """Of a rank's experts."""

    gate_up: Tensor  # (experts, 2f, h)
    down: Tensor  # (experts, h, f)
    gate_up_bias: Tensor | None  # (experts, 2f)
    down_bias: Tensor | None  # (experts, h)


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
    gate_up, down, gate_up_bias, down_bias = parameters
    hidden, out = rows.new_empty(len(rows), gate_up.shape[1]), rows.new_empty(rows.shape)
    for expert, (start, stop) in enumerate(ranges):
        own = slice(start, stop)
        _linear(rows[own], gate_up, gate_up_bias, expert, hidden[own])
        _linear(act.forward(hidden[own]), down, down_bias, expert, out[own])
    return hidden, out


def backward(
    saved: Saved, parameters: Parameters, ranges: Iterable[tuple[int, int]], act: Activation
) -> tuple[Tensor | None, ...]:
    """Gradients of the rows (m, h), of their scales (m), and of the four parameters, None without a bias."""
    rows, grads, scales, hidden = saved
    gate_up, down, gate_up_bias, down_bias = parameters
    of_rows, of_scales = rows.new_empty(rows.shape), rows.new_empty(len(rows), dtype=torch.float32)
    of_parameters = [None if parameter is None else torch.empty_like(parameter) for parameter in parameters]
    for expert, (start, stop) in enumerate(ranges):
        x, grad, scale = (each[start:stop] for each in (rows, grads, scales[:, None]))
        if hidden is None:
            pre = x.new_empty(len(x), gate_up.shape[1])
            _linear(x, gate_up, gate_up_bias, expert, pre)
        else:
            pre = hidden[start:stop]  # (m_e, 2f)
        out = act.forward(pre)  # (m_e, f)
        grad_act = grad @ down[expert]  # (m_e, f), not scaled
        # The gradient of a scale, <grad, output>, without computing the output again.
        torch.sum(grad_act * out, 1, dtype=torch.float32, out=of_scales[start:stop])
        if down_bias is not None:
            of_scales[start:stop] += (grad * down_bias[expert]).sum(1, dtype=torch.float32)
            of_parameters[3][expert] = (grad * scale).sum(0, dtype=torch.float32)
        torch.mm(grad.t(), out.mul_(scale), out=of_parameters[1][expert])
        grad_pre = act.backward(grad_act.mul_(scale), pre)  # (m_e, 2f)
        if gate_up_bias is not None:
            of_parameters[2][expert] = grad_pre.sum(0, dtype=torch.float32)
        torch.mm(grad_pre.t(), x, out=of_parameters[0][expert])
        torch.mm(grad_pre, gate_up[expert], out=of_rows[start:stop])
    return of_rows, of_scales, *of_parameters


def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None, expert: int, out: Tensor) -> None:
    """Write rows · weightᵀ + bias of an expert into `out`."""
    if bias is None:
        torch.mm(rows, weight[expert].t(), out=out)
    else:
        torch.addmm(bias[expert], rows, weight[expert].t(), out=out)
