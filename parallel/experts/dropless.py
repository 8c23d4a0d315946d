"""Dropless experts as one operator: rows are sorted by expert, exchanged and multiplied in groups.

With T tokens of this rank, k experts per token, E experts over n ranks, and act the activation of [gate, up]:

    sort the T·k rows by expert -> all-to-all -> out = down(act(gate_up(row))) -> all-to-all -> y = Σ_k weight · out

How many rows a rank receives depends on the data, and graphs must not: forward and backward are opaque operators with static
shapes, which take the axis's registered name. On one expert rank forward saves [gate, up] of its T·k rows. On several, the
number of rows is dynamic: eager runs save the rows received and their [gate, up] (`keep`); in graphs backward sends the rows
again together with their gradients, and multiplies by gate_up again: 11 products instead of 9. Elements that a rank sends, with
r = T·k·h: r(n-1)/n for each exchange of rows, two in forward and two or three in backward.

On GPUs in bf16, one kernel computes a product for all experts (`grouped.py`). Elsewhere the experts run one after the other, so
that each one's intermediate results stay in the cache (`sequential.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parallel import mesh
from parallel.activation_checkpointing import always_save
from parallel.experts import grouped, sequential
from parallel.experts.activations import ACTIVATIONS
from parallel.experts.exchange import Exchange
from parallel.mesh import Axis
from parallel.torch_internals import custom_op

Update = tuple[Tensor, Tensor]
"""The factors A (experts, r, i) and B (experts, o, r), scaled, of the low-rank updates B A of weights (experts, o, i)."""


def routed_experts(
    x: Tensor,
    weights: Tensor,
    indices: Tensor,
    gate_up: Tensor,
    down: Tensor,
    axis: Axis,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    gate_up_update: Update | None = None,
    down_update: Update | None = None,
    activation: str = "silu",
    keep: bool = False,
) -> Tensor:
    """Weighted sum of the outputs of each token's experts.

    Args:
        x: (T, h).
        weights: (T, k), in any float dtype.
        indices: (T, k) numbers of experts among all n·E/n.
        gate_up: (E/n, 2f, h), of this rank's experts.
        down: (E/n, h, f).
        axis: expert axis of n ranks, which hold consecutive experts.
        gate_up_bias: (E/n, 2f).
        down_bias: (E/n, h).
        gate_up_update: A (E/n, r, h) and B (E/n, 2f, r) of an update gate_up + B A, which is never materialized.
        down_update: A (E/n, r, f) and B (E/n, h, r).
        activation: one of `ACTIVATIONS`.
        keep: whether to save received rows for backward; no effect in graphs.

    Returns:
        (T, h).
    """
    optional = (gate_up_bias, down_bias, *(gate_up_update or (None, None)), *(down_update or (None, None)))
    keep = keep and axis.size > 1 and not torch.compiler.is_compiling()
    settings = axis.name, axis.size, activation, keep
    return _experts(x, weights, indices, gate_up, down, *optional, *settings)[0]


def scratch_bytes(x: Tensor, indices: Tensor, gate_up: Tensor, backward: bool, updated: bool) -> int:
    """Bytes that a call allocates besides its results, if the load is balanced.

    Args:
        updated: whether the weights have updates.
    """
    rows, f, h = indices.numel(), gate_up.shape[1] // 2, x.shape[1]
    # Forward: rows, [gate, up], their activation, outputs. Backward, at most: rows and gradients before and after the exchange,
    # and the rows' gradients; [gate, up], the activation, and the gradients of both.
    elements = 6 * h + 6 * f if backward else 3 * h + 3 * f
    # One product of an update at a time, before it is added.
    return rows * (elements + updated * max(h, 2 * f)) * x.element_size()


@custom_op("trainshed::experts")
def _experts(
    x: Tensor,
    weights: Tensor,
    indices: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    gate_up_a: Tensor | None,
    gate_up_b: Tensor | None,
    down_a: Tensor | None,
    down_b: Tensor | None,
    axis: str,
    size: int,
    activation: str,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y; the numbers of received rows (n, E/n); and tensors for backward, empty if not saved.

    These are the exchange's splits (2, n) on the host, on several expert ranks; [gate, up] of the rows, without biases if
    products are grouped, on one expert rank or with `keep`; and the rows, with `keep`.
    """
    exchange = Exchange(indices, len(gate_up), mesh.registered_axis(axis, size))
    rows = exchange.to_experts(exchange.gather(x))  # (m, h)
    updates = gate_up_a, gate_up_b, down_a, down_b
    parameters = sequential.Parameters(gate_up, down, gate_up_bias, down_bias, *updates)
    if grouped.has_kernel(parameters):
        hidden, out = grouped.forward(rows, parameters, exchange, activation)  # (m, 2f), (m, h)
    else:
        hidden, out = sequential.forward(rows, parameters, exchange.ranges(), ACTIVATIONS[activation])
    y = exchange.sum_over_tokens(out, weights)  # (T, h)
    hidden = hidden if size == 1 or keep else x.new_empty(0)
    return y, exchange.received, exchange.splits, hidden, rows if keep else x.new_empty(0)


@_experts.register_fake
def _(
    x: Tensor, weights: Tensor, indices: Tensor, gate_up: Tensor, down: Tensor, *more: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    *_, size, _, keep = more
    rows = indices.numel()  # if the load is balanced; in graphs, where sizes must be right, `keep` is false
    hidden = x.new_empty(rows, gate_up.shape[1]) if size == 1 or keep else x.new_empty(0)
    kept = x.new_empty(rows, x.shape[1]) if keep else x.new_empty(0)
    splits = indices.new_empty((2, size) if size > 1 else 0, device="cpu")
    return torch.empty_like(x), indices.new_empty(size, len(gate_up)), splits, hidden, kept


@custom_op("trainshed::experts_backward")
def _backward(
    grad: Tensor,
    x: Tensor,
    weights: Tensor,
    indices: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    gate_up_a: Tensor | None,
    gate_up_b: Tensor | None,
    down_a: Tensor | None,
    down_b: Tensor | None,
    received: Tensor,
    splits: Tensor,
    hidden: Tensor,
    rows: Tensor,
    axis: str,
    size: int,
    activation: str,
    keep: bool,
    frozen: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, weights, and `sequential.Parameters`; empty for absent and frozen parameters."""
    exchange = Exchange(indices, len(gate_up), mesh.registered_axis(axis, size), received, splits)
    scales = exchange.to_experts(weights.flatten().index_select(0, exchange.order))
    if keep or size == 1:
        rows = rows if keep else exchange.gather(x)
        grads = exchange.to_experts(exchange.gather(grad))
    else:
        both = exchange.to_experts(torch.cat((exchange.gather(x), exchange.gather(grad)), 1))
        rows, grads = (part.contiguous() for part in both.chunk(2, 1))
        del both
    saved = sequential.Saved(rows, grads, scales, hidden if keep or size == 1 else None)
    updates = gate_up_a, gate_up_b, down_a, down_b
    parameters = sequential.Parameters(gate_up, down, gate_up_bias, down_bias, *updates)
    if grouped.has_kernel(parameters):
        found = grouped.backward(saved, parameters, exchange, activation, frozen)
    else:
        found = sequential.backward(saved, parameters, exchange.ranges(), ACTIVATIONS[activation], frozen)
    grad_rows, grad_scales, *grad_parameters = found
    grad_x = exchange.sum_over_tokens(grad_rows)
    grad_weights = exchange.to_tokens(grad_scales).to(weights.dtype)
    every = (x.new_empty(0) if grad is None else grad for grad in grad_parameters)
    result: Any = (grad_x, grad_weights, *every)  # ten, as the operator's schema says
    return result


@_backward.register_fake
def _(
    grad: Tensor, x: Tensor, weights: Tensor, indices: Tensor, gate_up: Tensor, down: Tensor, *more: Any
) -> tuple[Tensor, ...]:
    optional, frozen = more[:6], more[-1]  # biases and updates; saved tensors and settings are in between
    parameters = gate_up, down, *optional
    results = [torch.empty_like(x), torch.empty_like(weights)]
    for index, parameter in enumerate(parameters):
        absent = parameter is None or (frozen and index < sequential.BASE_PARAMETERS)
        results.append(x.new_empty(0) if absent else torch.empty_like(parameter))
    return tuple(results)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors, ctx.settings = inputs[:-4], inputs[-4:]
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.given = [tensor is not None for tensor in tensors[3:]]


def _differentiate(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Any, ...]:
    frozen = not ctx.needs_input_grad[3]  # of gate_up; weights and biases are frozen together
    x, weights, *found = _backward(grad.contiguous(), *ctx.saved_tensors, *ctx.settings, frozen)
    needed = [
        given and not (frozen and index < sequential.BASE_PARAMETERS) for index, given in enumerate(ctx.given)
    ]
    found = (gradient if need else None for gradient, need in zip(found, needed, strict=True))
    return x, weights, None, *found, None, None, None, None


_experts.register_autograd(_differentiate, setup_context=_setup_context)
always_save(torch.ops.trainshed.experts.default)
