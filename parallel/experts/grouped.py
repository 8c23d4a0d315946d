"""Dropless experts as one operator: rows are sorted by expert, exchanged and multiplied in groups.

With T tokens of this rank, k experts per token, E experts over n ranks, and act the activation of [gate, up]:

    sort the T·k rows by expert -> all-to-all -> out = down(act(gate_up(row))) -> all-to-all -> y = Σ_k weight · out

How many rows a rank receives depends on the data, and graphs must not: forward and backward are opaque operators with static
shapes, which take the axis's registered name. On one expert rank forward saves [gate, up] of its T·k rows. On several, the
number of rows is dynamic: eager runs save the rows received and their [gate, up] (`keep`); in graphs backward sends the rows
again together with their gradients, and multiplies by gate_up again: 11 products instead of 9. Elements that a rank sends, with
r = T·k·h: r(n-1)/n for each exchange of rows, two in forward and two or three in backward.

On GPUs in bf16, one kernel computes a product for all experts, and one the activation of all rows (gpu_activations.py). Elsewhere
the experts run one after the other, so that each one's intermediate results stay in the cache (`sequential.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel import collectives, mesh
from parallel.activation_checkpointing import save_outputs
from parallel.experts import sequential
from parallel.experts.activations import ACTIVATIONS
from parallel.mesh import Axis

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


class _Exchange:
    """Moves rows between the order of this rank's tokens and that of this rank's experts.

    Args:
        indices: (T, k).
        local: number of experts per rank.
        received: (n, local) number of rows that each rank sends here for each expert, if known.
        splits: (2, n) numbers of rows to and from each rank, on the host, if `received` is known.
    """

    def __init__(
        self,
        indices: Tensor,
        local: int,
        axis: Axis,
        received: Tensor | None = None,
        splits: Tensor | None = None,
    ) -> None:
        self.axis, self.k = axis, indices.shape[1]
        flat = indices.flatten()
        self.rows = len(flat)  # m, of this rank's experts
        self.splits = flat.new_empty(0, device="cpu")
        self.order = torch.argsort(flat, stable=True)  # (T·k)
        numbers = torch.arange(len(flat), device=flat.device)
        # (T, k), of each choice's row
        self.positions = torch.empty_like(flat).scatter_(0, self.order, numbers).view_as(indices)
        sent = torch.zeros(local * axis.size, dtype=torch.int64, device=flat.device)
        sent.scatter_add_(0, flat, torch.ones_like(flat))  # (E)
        if axis.size == 1:
            self.received = sent[None]
        else:
            if received is None:
                received = collectives.wait(collectives.start_all_to_all(sent, axis)).view(axis.size, local)
            self.received = received
            if splits is None:  # the only host synchronization of forward and backward
                splits = torch.stack((sent.view(axis.size, local).sum(1), received.sum(1))).cpu()
            self.splits = splits
            self.send, self.receive = splits.tolist()
            self.rows = sum(self.receive)
            experts = torch.arange(local, device=flat.device).repeat(axis.size)
            owners = experts.repeat_interleave(received.flatten(), output_size=self.rows)
            self.regroup = torch.argsort(owners, stable=True)  # received rows, by rank, to rows by expert
        self.counts = self.received.sum(0)  # (local) rows of each expert
        self.offsets = self.counts.cumsum(0).to(torch.int32)

    def ranges(self) -> Iterator[tuple[int, int]]:
        """First row of each expert and one past its last, on the host."""
        return pairwise((0, *self.offsets.tolist()))

    def gather(self, x: Tensor) -> Tensor:
        """Repeat a token's row for each of its experts: (T, ...) -> (T·k, ...), sorted by expert."""
        return x.index_select(0, self.order // self.k)

    def to_experts(self, rows: Tensor) -> Tensor:
        """Exchange rows (T·k, ...) sorted by expert -> (m, ...) of this rank's experts, grouped by expert."""
        if self.axis.size == 1:
            return rows
        arrived = collectives.start_uneven_all_to_all(rows, self.send, self.receive, self.axis)
        return collectives.wait(arrived).index_select(0, self.regroup)

    def to_tokens(self, rows: Tensor) -> Tensor:
        """Return rows of this rank's experts (m, ...) to their tokens -> (T, k, ...)."""
        return self._back(rows)[self.positions]

    def sum_over_tokens(self, rows: Tensor, weights: Tensor | None = None) -> Tensor:
        """Sum the rows (m, h) of each token, times its weights (T, k) if given -> (T, h), in the rows' dtype."""
        rows = self._back(rows)
        if rows.dtype == torch.float32 and rows.device.type == "cpu":
            weights = None if weights is None else weights.float()
            return F.embedding_bag(self.positions, rows, mode="sum", per_sample_weights=weights)
        chosen = rows[self.positions]  # (T, k, h)
        return (chosen if weights is None else chosen * weights[..., None]).sum(1).to(rows.dtype)

    def _back(self, rows: Tensor) -> Tensor:
        """Send rows of this rank's experts back to their source ranks, sorted there by expert -> (T·k, ...)."""
        if self.axis.size == 1:
            return rows
        ungrouped = rows.index_select(0, self.regroup.argsort())
        return collectives.wait(
            collectives.start_uneven_all_to_all(ungrouped, self.receive, self.send, self.axis)
        )

    def owners(self) -> Tensor:
        """Each row's expert (m), int32."""
        return self.of_rows(torch.arange(len(self.counts), dtype=torch.int32, device=self.counts.device))

    def of_rows(self, of_experts: Tensor) -> Tensor:
        """Repeat each expert's entry of a tensor (local, ...) for each of its rows -> (m, ...)."""
        return of_experts.repeat_interleave(self.counts, 0, output_size=self.rows)


def _has_kernel(parameters: sequential.Parameters) -> bool:
    """Whether torch has kernels for the grouped products: on GPUs in bf16, rows a multiple of 16 bytes."""
    factors = parameters.factors()
    wide = all(size % 8 == 0 for factor in factors for size in factor.shape[1:])
    return factors[0].is_cuda and factors[0].dtype == torch.bfloat16 and wide


def _product(
    rows: Tensor,
    weight: Tensor,
    exchange: _Exchange,
    bias: Tensor | None = None,
    update: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    """Grouped product (m, a), (experts, b, a) -> (m, b) in one kernel; a low-rank update takes two more."""
    if not len(rows):
        return rows.new_zeros(0, weight.shape[1])
    result = F.grouped_mm(rows, weight.transpose(1, 2), offs=exchange.offsets)
    if update[0] is not None:
        result += _product(_product(rows, update[0], exchange), update[1], exchange)
    return result if bias is None else result + exchange.of_rows(bias)


def _sums(grad: Tensor, factors: Tensor, exchange: _Exchange) -> Tensor:
    """Sums (experts, o) of each expert's rows (m, o) times factors (m).

    A grouped product with columns of factors, whose rows must have 16 bytes.
    """
    columns = factors.to(grad.dtype)[:, None].repeat(1, 8)
    return _weight_gradient(grad, columns, exchange)[..., 0].contiguous()


def _activate(hidden: Tensor, activation: str, bias: Tensor | None, exchange: _Exchange) -> Tensor:
    """The activation (m, f) of [gate, up] (m, 2f) without biases."""
    if hidden.is_cuda:
        from parallel.experts import gpu_activations

        owners = None if bias is None else exchange.owners()
        return gpu_activations.forward(hidden, activation, bias, owners)
    return ACTIVATIONS[activation].forward(hidden if bias is None else hidden + exchange.of_rows(bias))


def _activation_gradients(
    grad: Tensor, hidden: Tensor, scales: Tensor, activation: str, bias: Tensor | None, exchange: _Exchange
) -> tuple[Tensor, Tensor, Tensor]:
    """Scaled activation (m, f), and gradients of the scales (m) and of [gate, up] (m, 2f).

    Overwrites `grad` (m, f), the activation's gradient before it is scaled.
    """
    if hidden.is_cuda:
        from parallel.experts import gpu_activations

        owners = None if bias is None else exchange.owners()
        return gpu_activations.backward(grad, hidden, scales, activation, bias, owners)
    hidden, scales = hidden if bias is None else hidden + exchange.of_rows(bias), scales[:, None]
    out, grad_scales, grad_hidden = ACTIVATIONS[activation].backward(grad, hidden, scales)
    return (out * scales).to(out.dtype), grad_scales, grad_hidden


@torch.library.custom_op("trainshed::experts", mutates_args=())
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
    exchange = _Exchange(indices, len(gate_up), mesh.registered_axis(axis, size))
    rows = exchange.to_experts(exchange.gather(x))  # (m, h)
    updates = (gate_up_a, gate_up_b), (down_a, down_b)
    parameters = sequential.Parameters(gate_up, down, gate_up_bias, down_bias, *updates[0], *updates[1])
    if _has_kernel(parameters):
        hidden = _product(rows, gate_up, exchange, update=updates[0])  # (m, 2f)
        active = _activate(hidden, activation, gate_up_bias, exchange)  # (m, f)
        out = _product(active, down, exchange, down_bias, updates[1])  # (m, h)
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


@torch.library.custom_op("trainshed::experts_backward", mutates_args=())
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
    exchange = _Exchange(indices, len(gate_up), mesh.registered_axis(axis, size), received, splits)
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
    if _has_kernel(parameters):
        found = _grouped_backward(saved, parameters, exchange, activation, frozen)
    else:
        found = sequential.backward(saved, parameters, exchange.ranges(), ACTIVATIONS[activation], frozen)
    grad_rows, grad_scales, *grad_parameters = found
    grad_x = exchange.sum_over_tokens(grad_rows)
    grad_weights = exchange.to_tokens(grad_scales).to(weights.dtype)
    grad_parameters = [x.new_empty(0) if grad is None else grad for grad in grad_parameters]
    return grad_x, grad_weights, *grad_parameters


def _grouped_backward(
    saved: sequential.Saved,
    parameters: sequential.Parameters,
    exchange: _Exchange,
    activation: str,
    frozen: bool,
) -> tuple[Tensor | None, ...]:
    """Same as `sequential.backward`, with one kernel per product, and `hidden` without biases."""
    rows, grads, scales, hidden = saved
    gate_up, down, gate_up_bias, down_bias, gate_up_a, gate_up_b, down_a, down_b = parameters
    if hidden is None:
        hidden = _product(rows, gate_up, exchange, update=(gate_up_a, gate_up_b))
    grad_act = _input_gradient(grads, down, exchange, down_a, down_b)  # (m, f), not scaled
    # The gradient of a scale, <grad, output>, without computing the output again. Scaling the activation, not the gradients of
    # the outputs, scales the gradients of `down`, too.
    found = _activation_gradients(grad_act, hidden, scales, activation, gate_up_bias, exchange)
    scaled, grad_scales, grad_hidden = found  # (m, f), (m), (m, 2f)
    if down_bias is not None:
        grad_scales = grad_scales + (grads * exchange.of_rows(down_bias)).sum(1, dtype=torch.float32)
    of_parameters = [None, None, None, None]
    if not frozen:
        of_parameters = [
            _weight_gradient(grad_hidden, rows, exchange),
            _weight_gradient(grads, scaled, exchange),
            None if gate_up_bias is None else _sums(grad_hidden, torch.ones_like(scales), exchange),
            None if down_bias is None else _sums(grads, scales, exchange),
        ]
    of_parameters += _update_gradients(grad_hidden, rows, exchange, gate_up_a, gate_up_b)
    of_parameters += _update_gradients(grads, scaled, exchange, down_a, down_b)
    grad_rows = _input_gradient(grad_hidden, gate_up, exchange, gate_up_a, gate_up_b)
    return grad_rows, grad_scales, *of_parameters


def _input_gradient(
    grad: Tensor, weight: Tensor, exchange: _Exchange, a: Tensor | None, b: Tensor | None
) -> Tensor:
    """Input gradients (m, i) from output gradients (m, o), weights (experts, o, i) and their updates."""
    transposed = (None, None) if a is None or b is None else (b.transpose(1, 2), a.transpose(1, 2))
    return _product(grad, weight.transpose(1, 2), exchange, update=transposed)


def _weight_gradient(grad: Tensor, rows: Tensor, exchange: _Exchange) -> Tensor:
    """Gradients of weights (experts, o, i) from those of the outputs (m, o) and the inputs (m, i)."""
    if not len(rows):  # torch's kernel is not specified for it
        return grad.new_zeros(len(exchange.counts), grad.shape[1], rows.shape[1])
    return F.grouped_mm(grad.t(), rows, offs=exchange.offsets)


def _update_gradients(
    grad: Tensor, rows: Tensor, exchange: _Exchange, a: Tensor | None, b: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the factors of an update from those of its outputs (m, o) and its inputs (m, i)."""
    if a is None or b is None:
        return None, None
    low = _product(grad, b.transpose(1, 2), exchange)  # (m, r)
    return _weight_gradient(low, rows, exchange), _weight_gradient(
        grad, _product(rows, a, exchange), exchange
    )


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
save_outputs(torch.ops.trainshed.experts.default)
