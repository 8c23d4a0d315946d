"""Experts one after the other: each computes its outputs or gradients before the next one starts.

For devices without a kernel for grouped products. One expert's intermediate results (rows of 2f elements) fit into a CPU's cache;
those of all experts would be read from memory by each of a dozen operations.

An expert multiplies a window of the table of rows: its own, with oneDNN padded with neighbouring ones to one of a few sizes for
which kernels exist (`host_products`). Results of neighbouring rows are dropped, and zeroed before sums over rows. A product of
MKL without such rows is written where its result is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from parallel.experts.activations import Activation
from parallel.host_products import multiply_to, rounded_up

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

    def target(self, table: Tensor) -> Tensor | None:
        """The expert's rows of a table, for products to write to; None if the window has more rows."""
        return table[self.own] if self.rows == self.own else None

    def store(self, table: Tensor, target: Tensor | None, result: Tensor) -> None:
        """Copy the expert's rows of a window's result to a table, unless they are in `target`."""
        if result is not target:
            table[self.own] = result[self.inside]


class _Gradients(NamedTuple):
    """Those of a `_Projection`; None where none are needed."""

    weight: Tensor | None
    bias: Tensor | None
    a: Tensor | None
    b: Tensor | None


class _Projection(NamedTuple):
    """Weight, bias and LoRA's factors of one of the experts' two products."""

    weight: Tensor  # (experts, n, m)
    bias: Tensor | None  # (experts, n)
    a: Tensor | None  # (experts, r, m)
    b: Tensor | None  # (experts, n, r)

    def forward(self, rows: Tensor, expert: int, target: Tensor | None = None) -> Tensor:
        """rows (w, m) · (weight + b a)ᵀ + bias (w, n) of an expert; `target`: memory for it."""
        bias = None if self.bias is None else self.bias[expert]
        out = multiply_to(target, rows, self.weight[expert].t(), bias)
        if self.a is None or self.b is None:
            return out
        return out.addmm_(rows @ self.a[expert].t(), self.b[expert].t())

    def backward(
        self, grad: Tensor, expert: int, target: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Gradient (w, m) of the rows, and that of rows · aᵀ (w, r), from that of the result (w, n).

        Args:
            target: memory for the first.
        """
        of_rows = multiply_to(target, grad, self.weight[expert])
        if self.a is None or self.b is None:
            return of_rows, None
        low = grad @ self.b[expert]
        return of_rows.addmm_(low, self.a[expert]), low

    def differentiate(
        self, found: _Gradients, expert: int, rows: Tensor, grad: Tensor, low: Tensor | None
    ) -> None:
        """Write the gradients of an expert's weight and factors; `low`: second result of `backward`."""
        if found.weight is not None:
            target = found.weight[expert]
            result = multiply_to(target, grad.t(), rows)
            if result is not target:
                target.copy_(result)
        if self.a is not None and low is not None and found.a is not None and found.b is not None:
            torch.mm(grad.t(), rows @ self.a[expert].t(), out=found.b[expert])
            torch.mm(low.t(), rows, out=found.a[expert])


def forward(
    rows: Tensor, parameters: Parameters, ranges: Iterable[tuple[int, int]], act: Activation
) -> tuple[Tensor, Tensor]:
    """[gate, up] (m, 2f) and the outputs (m, h) of rows (m, h) grouped by expert.

    Args:
        ranges: first row of each expert and one past its last.
    """
    gate_up, down = _projections(parameters)
    hidden, out = rows.new_empty(len(rows), gate_up.weight.shape[1]), rows.new_empty(rows.shape)
    for expert, window in _windows(ranges, len(rows), gate_up.weight[0].numel()):
        for_hidden, for_out = window.target(hidden), window.target(out)
        pre = gate_up.forward(rows[window.rows], expert, for_hidden)  # (w, 2f)
        window.store(hidden, for_hidden, pre)
        window.store(out, for_out, down.forward(act.forward(pre), expert, for_out))
    return hidden, out


def backward(
    saved: Saved, parameters: Parameters, ranges: Iterable[tuple[int, int]], act: Activation, frozen: bool
) -> tuple[Tensor, Tensor, *tuple[Tensor | None, ...]]:
    """Gradients of the rows (m, h), their scales (m) and the parameters, None for absent ones.

    Args:
        frozen: whether weights and biases need no gradients; theirs are None, too.
    """
    rows, grads, scales, hidden = saved
    gate_up, down = _projections(parameters)
    of_rows, of_scales = rows.new_empty(rows.shape), rows.new_empty(len(rows), dtype=torch.float32)
    needed = [
        None if parameter is None or (frozen and index < BASE_PARAMETERS) else torch.empty_like(parameter)
        for index, parameter in enumerate(parameters)
    ]
    found_gate_up, found_down = (
        _Gradients(*(needed[i] for i in own)) for own in ((0, 2, 4, 5), (1, 3, 6, 7))
    )
    for expert, window in _windows(ranges, len(rows), gate_up.weight[0].numel()):
        own, inside = window.own, window.inside
        if own.start == own.stop:
            for gradient in (each for each in needed if each is not None):
                gradient[expert].zero_()
            continue
        x, grad, scale = (each[window.rows] for each in (rows, grads, scales[:, None]))
        pre = gate_up.forward(x, expert) if hidden is None else hidden[window.rows]  # (w, 2f)
        grad_act, low = down.backward(grad, expert)  # (w, f) and (w, r), not scaled
        out, products, grad_pre = act.backward(grad_act, pre, scale)  # (w, f), (w), (w, 2f)
        # The gradient of a scale, <grad, output>, without computing the output again.
        of_scales[own] = products[inside]
        if down.bias is not None:
            of_scales[own] += (grad[inside] * down.bias[expert]).sum(1, dtype=torch.float32)
        if found_down.bias is not None:
            found_down.bias[expert] = (grad * scale)[inside].sum(0, dtype=torch.float32)
        out, grad_pre = _only(out.mul_(scale), inside), _only(grad_pre, inside)
        down.differentiate(found_down, expert, out, grad, low)
        if found_gate_up.bias is not None:
            found_gate_up.bias[expert] = grad_pre.sum(0, dtype=torch.float32)
        for_rows = window.target(of_rows)
        of_window, low = gate_up.backward(grad_pre, expert, for_rows)  # (w, h), (w, r)
        window.store(of_rows, for_rows, of_window)
        gate_up.differentiate(found_gate_up, expert, x, grad_pre, low)
    return of_rows, of_scales, *needed


def _projections(p: Parameters) -> tuple[_Projection, _Projection]:
    """The products before and after the activation."""
    return (
        _Projection(p.gate_up, p.gate_up_bias, p.gate_up_a, p.gate_up_b),
        _Projection(p.down, p.down_bias, p.down_a, p.down_b),
    )


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
    if inside != slice(0, len(table)):
        table[: inside.start].zero_()
        table[inside.stop :].zero_()
    return table
