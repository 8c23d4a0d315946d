"""Grouped products on GPUs: one kernel multiplies the rows of all experts.

Another computes the activation of all rows (gpu_kernels.py). Same functions as `sequential.py`, for rows (m, h) that are
grouped by expert.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.experts.activations import ACTIVATIONS
from parallel.experts.exchange import Exchange
from parallel.experts.sequential import Parameters, Saved


def has_kernel(parameters: Parameters) -> bool:
    """Whether torch has kernels for the grouped products: on GPUs in bf16, rows a multiple of 16 bytes."""
    factors = parameters.factors()
    wide = all(size % 8 == 0 for factor in factors for size in factor.shape[1:])
    return factors[0].is_cuda and factors[0].dtype == torch.bfloat16 and wide


def forward(
    rows: Tensor, parameters: Parameters, exchange: Exchange, activation: str
) -> tuple[Tensor, Tensor]:
    """[gate, up] (m, 2f) of the rows (m, h), without biases, and the outputs of their experts (m, h)."""
    hidden = gate_up(rows, parameters, exchange)
    active = _activate(hidden, activation, parameters.gate_up_bias, exchange)  # (m, f)
    update = parameters.down_a, parameters.down_b
    return hidden, _product(active, parameters.down, exchange, parameters.down_bias, update)


def gate_up(rows: Tensor, parameters: Parameters, exchange: Exchange) -> Tensor:
    """[gate, up] (m, 2f) of the rows (m, h), without biases."""
    return _product(rows, parameters.gate_up, exchange, update=(parameters.gate_up_a, parameters.gate_up_b))


def backward(
    saved: Saved,
    parameters: Parameters,
    exchange: Exchange,
    activation: str,
    frozen: bool,
    send: Callable[[Tensor, Tensor], None],
) -> list[Tensor | None]:
    """Gradients of the parameters, as of `sequential.backward`, with one kernel per product.

    Args:
        saved: with `hidden`, without biases.
        send: called with the gradients of rows and scales, before those of the parameters, so that they return meanwhile.
    """
    rows, grads, scales, hidden = saved
    assert hidden is not None
    gate_up, down, gate_up_bias, down_bias, gate_up_a, gate_up_b, down_a, down_b = parameters
    grad_act = _input_gradient(grads, down, exchange, down_a, down_b)  # (m, f), not scaled
    # The gradient of a scale, <grad, output>, without computing the output again. Scaling the activation, not the gradients of
    # the outputs, scales the gradients of `down`, too.
    found = _activation_gradients(grad_act, hidden, scales, activation, gate_up_bias, exchange)
    scaled, grad_scales, grad_hidden = found  # (m, f), (m), (m, 2f)
    if down_bias is not None:
        grad_scales = grad_scales + (grads * exchange.of_rows(down_bias)).sum(1, dtype=torch.float32)
    send(_input_gradient(grad_hidden, gate_up, exchange, gate_up_a, gate_up_b), grad_scales)
    of_parameters: list[Tensor | None] = [None, None, None, None]
    if not frozen:
        of_parameters = [
            _weight_gradient(grad_hidden, rows, exchange),
            _weight_gradient(grads, scaled, exchange),
            None if gate_up_bias is None else _sums(grad_hidden, torch.ones_like(scales), exchange),
            None if down_bias is None else _sums(grads, scales, exchange),
        ]
    of_parameters += _update_gradients(grad_hidden, rows, exchange, gate_up_a, gate_up_b)
    return [*of_parameters, *_update_gradients(grads, scaled, exchange, down_a, down_b)]


def _product(
    rows: Tensor,
    weight: Tensor,
    exchange: Exchange,
    bias: Tensor | None = None,
    update: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    """Grouped product (m, a), (experts, b, a) -> (m, b) in one kernel; a low-rank update takes two more."""
    if not len(rows):
        return rows.new_zeros(0, weight.shape[1])
    result = F.grouped_mm(rows, weight.transpose(1, 2), offs=exchange.offsets)
    a, b = update
    if a is not None and b is not None:
        result += _product(_product(rows, a, exchange), b, exchange)
    return result if bias is None else result + exchange.of_rows(bias)


def _sums(grad: Tensor, factors: Tensor, exchange: Exchange) -> Tensor:
    """Sums (experts, o) of each expert's rows (m, o) times factors (m).

    A grouped product with columns of factors, whose rows must have 16 bytes.
    """
    columns = factors.to(grad.dtype)[:, None].repeat(1, 8)
    return _weight_gradient(grad, columns, exchange)[..., 0].contiguous()


def _activate(hidden: Tensor, activation: str, bias: Tensor | None, exchange: Exchange) -> Tensor:
    """The activation (m, f) of [gate, up] (m, 2f) without biases."""
    if hidden.is_cuda:
        from parallel.experts import gpu_kernels

        owners = None if bias is None else exchange.owners()
        return gpu_kernels.forward(hidden, activation, bias, owners)
    return ACTIVATIONS[activation].forward(hidden if bias is None else hidden + exchange.of_rows(bias))


def _activation_gradients(
    grad: Tensor, hidden: Tensor, scales: Tensor, activation: str, bias: Tensor | None, exchange: Exchange
) -> tuple[Tensor, Tensor, Tensor]:
    """Scaled activation (m, f), and gradients of the scales (m) and of [gate, up] (m, 2f).

    Overwrites `grad` (m, f), the activation's gradient before it is scaled.
    """
    if hidden.is_cuda:
        from parallel.experts import gpu_kernels

        owners = None if bias is None else exchange.owners()
        return gpu_kernels.backward(grad, hidden, scales, activation, bias, owners)
    hidden, scales = hidden if bias is None else hidden + exchange.of_rows(bias), scales[:, None]
    out, grad_scales, grad_hidden = ACTIVATIONS[activation].backward(grad, hidden, scales)
    return (out * scales).to(out.dtype), grad_scales, grad_hidden


def _input_gradient(
    grad: Tensor, weight: Tensor, exchange: Exchange, a: Tensor | None, b: Tensor | None
) -> Tensor:
    """Input gradients (m, i) from output gradients (m, o), weights (experts, o, i) and their updates."""
    transposed = (None, None) if a is None or b is None else (b.transpose(1, 2), a.transpose(1, 2))
    return _product(grad, weight.transpose(1, 2), exchange, update=transposed)


def _weight_gradient(grad: Tensor, rows: Tensor, exchange: Exchange) -> Tensor:
    """Gradients of weights (experts, o, i) from those of the outputs (m, o) and the inputs (m, i)."""
    if not len(rows):  # torch's kernel is not specified for it
        return grad.new_zeros(len(exchange.counts), grad.shape[1], rows.shape[1])
    result = F.grouped_mm(grad.t(), rows, offs=exchange.offsets)
    # Of groups without rows, torch's kernel for Blackwell writes nothing (pytorch issues 172439 and 193633).
    return result.masked_fill_((exchange.counts == 0)[:, None, None], 0)


def _update_gradients(
    grad: Tensor, rows: Tensor, exchange: Exchange, a: Tensor | None, b: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the factors of an update from those of its outputs (m, o) and its inputs (m, i)."""
    if a is None or b is None:
        return None, None
    low = _product(grad, b.transpose(1, 2), exchange)  # (m, r)
    return _weight_gradient(low, rows, exchange), _weight_gradient(
        grad, _product(rows, a, exchange), exchange
    )
