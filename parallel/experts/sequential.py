"""Experts one after the other: each computes its outputs or gradients before the next one starts.

For devices without a kernel for grouped products. One expert's intermediate results (rows of 2f elements) fit into a CPU's cache;
those of all experts would be read from memory by each of a dozen operations.

An expert multiplies a window of the table of rows: its own, padded with neighbouring ones to one of a few sizes for which kernels
exist (`host_products`). Results of neighbouring rows are dropped, and zeroed before sums over rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from parallel.experts.activations import Activation
from parallel.host_products import multiply, rounded_up

BASE_PARAMETERS = 4  # the factors of updates follow, and train while these are frozen


class Parameters(NamedTuple):
    """Parameters of a rank's experts; the last four are LoRA's factors, with B already scaled."""

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
    """Inputs of backward."""

    rows: Tensor  # (m, h), grouped by expert
    grads: Tensor  # (m, h), of the tokens' outputs
    scales: Tensor  # (m), weight of each row in its token's output
    hidden: Tensor | None  # (m, 2f), [gate, up]; None: recomputed


class _Window(NamedTuple):
    """The w rows that an expert multiplies."""

    rows: slice  # of the table
    own: slice  # of the table, those of the expert
    inside: slice  # of the window, those of the expert


def forward(
    rows: Tensor, parameters: Parameters, ranges: Iterable[tuple[int, int]], act: Activation
) -> tuple[Tensor, Tensor]:
    """[gate, up] (m, 2f) and the outputs (m, h) of rows (m, h) grouped by expert.

    Args:
        ranges: first row of each expert and one past its last.
    """
    p = parameters
    hidden, out = rows.new_empty(len(rows), p.gate_up.shape[1]), rows.new_empty(rows.shape)
    for expert, (window, own, inside) in _windows(ranges, len(rows), p.gate_up[0].numel()):
        pre = _linear(rows[window], expert, p.gate_up, p.gate_up_bias, p.gate_up_a, p.gate_up_b)  # (w, 2f)
        hidden[own] = pre[inside]
        out[own] = _linear(act.forward(pre), expert, p.down, p.down_bias, p.down_a, p.down_b)[inside]
    return hidden, out


def backward(
    saved: Saved, parameters: Parameters, ranges: Iterable[tuple[int, int]], act: Activation, frozen: bool
) -> tuple[Tensor | None, ...]:
    """Gradients of the rows (m, h), their scales (m) and the parameters, None for absent ones.

    Args:
        frozen: whether weights and biases need no gradients; theirs are None, too.
    """
    rows, grads, scales, hidden = saved
    gate_up, down, gate_up_bias, down_bias, gate_up_a, gate_up_b, down_a, down_b = parameters
    of_rows, of_scales = rows.new_empty(rows.shape), rows.new_empty(len(rows), dtype=torch.float32)
    needed = [
        None if parameter is None or (frozen and index < BASE_PARAMETERS) else torch.empty_like(parameter)
        for index, parameter in enumerate(parameters)
    ]
    found = Parameters(*needed)
    for expert, (window, own, inside) in _windows(ranges, len(rows), gate_up[0].numel()):
        if own.start == own.stop:
            for gradient in found:
                if gradient is not None:
                    gradient[expert].zero_()
            continue
        x, grad, scale = (each[window] for each in (rows, grads, scales[:, None]))
        if hidden is None:
            pre = _linear(x, expert, gate_up, gate_up_bias, gate_up_a, gate_up_b)
        else:
            pre = hidden[window]  # (w, 2f)
        grad_act = multiply(grad, down[expert])  # (w, f), not scaled
        if down_b is not None:
            low = grad @ down_b[expert]  # (w, r), not scaled
            grad_act.addmm_(low, down_a[expert])
        out, products, grad_pre = act.backward(grad_act, pre, scale)  # (w, f), (w), (w, 2f)
        # The gradient of a scale, <grad, output>, without computing the output again.
        of_scales[own] = products[inside]
        if down_bias is not None:
            of_scales[own] += (grad[inside] * down_bias[expert]).sum(1, dtype=torch.float32)
        if found.down_bias is not None:
            found.down_bias[expert] = (grad * scale)[inside].sum(0, dtype=torch.float32)
        out, grad_pre = _only(out.mul_(scale), inside), _only(grad_pre, inside)
        if found.down is not None:
            found.down[expert] = multiply(grad.t(), out)
        if found.down_b is not None:
            torch.mm(grad.t(), out @ down_a[expert].t(), out=found.down_b[expert])
            torch.mm(low.t(), out, out=found.down_a[expert])
        if found.gate_up_bias is not None:
            found.gate_up_bias[expert] = grad_pre.sum(0, dtype=torch.float32)
        if found.gate_up is not None:
            found.gate_up[expert] = multiply(grad_pre.t(), x)
        of_rows[own] = multiply(grad_pre, gate_up[expert])[inside]
        if found.gate_up_b is not None:
            low = grad_pre @ gate_up_b[expert]  # (w, r)
            of_rows[own].addmm_(low[inside], gate_up_a[expert])
            torch.mm(grad_pre.t(), x @ gate_up_a[expert].t(), out=found.gate_up_b[expert])
            torch.mm(low.t(), x, out=found.gate_up_a[expert])
    return of_rows, of_scales, *found


def _windows(ranges: Iterable[tuple[int, int]], total: int, weights: int) -> Iterator[tuple[int, _Window]]:
    """Each expert and its possibly empty window of `total` rows; `weights`: size of its larger matrix."""
    for expert, (start, stop) in enumerate(ranges):
        size = min(total, rounded_up(stop - start, weights))
        first = min(start, total - size)
        yield (
            expert,
            _Window(slice(first, first + size), slice(start, stop), slice(start - first, stop - first)),
        )


def _only(table: Tensor, inside: slice) -> Tensor:
    """Zero all other rows of the table in place."""
    table[: inside.start].zero_()
    table[inside.stop :].zero_()
    return table


def _linear(
    rows: Tensor, expert: int, weight: Tensor, bias: Tensor | None, a: Tensor | None, b: Tensor | None
) -> Tensor:
    """rows · (weight + b a)ᵀ + bias of an expert."""
    out = multiply(rows, weight[expert].t(), None if bias is None else bias[expert])
    return out if a is None else out.addmm_(rows @ a[expert].t(), b[expert].t())
