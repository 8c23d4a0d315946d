"""Dropless experts: rows are sorted by expert, exchanged and multiplied in groups.

With T tokens of this rank, k experts per token, E experts over n ranks, and act the activation of [gate, up]:

    sort the T·k rows by expert -> all-to-all -> out = down(act(gate_up(row))) -> all-to-all -> y = Σ_k weight · out

How many rows a rank receives depends on the data, and graphs must not: forward and backward are opaque operators with static
shapes, which take the axis's registered name. On one expert rank forward saves [gate, up] of its T·k rows. On several, the
number of rows is dynamic: eager runs save the rows received and their [gate, up] (`keep`); in graphs backward sends the rows
again together with their gradients, and multiplies by gate_up again: 11 products instead of 9. Elements that a rank sends, with
r = T·k·h: r(n-1)/n for each exchange of rows, two in forward and two or three in backward.

What overlaps, on several expert ranks:

    forward     expert_order   sort, exchange the numbers of rows, start to copy them to the host, unless a pass that counted
                               choices has left them with the choices
                experts        gather rows; the host waits for the numbers; exchange rows, products, start to return outputs
                               (the caller's own work: shared experts)
                experts_sum    wait for the outputs, sum them
    backward    experts_send   start to exchange gradients
                               (backward of the caller's work)
                experts_backward  products, start to return the rows' gradients, weight gradients, wait, sum

The host waits while the device gathers rows, so that the device has work until the exchange is queued. Recomputation takes the
order and the numbers of the forward pass (`computed_once`), and waits no more. Static shapes would need no wait, but cost more
than one of that length. In the three shipped profiles with `expert` above 1, which is 8 on a node of H200, milliseconds per
microbatch and layer are, if 0.8 of the links' and of the memory's bandwidth is reached:

                  gather of rows   one exchange   shared experts   weight gradients   room for all rows, instead of
    deepseek-v3   0.24             1.14           0.47             3.7                10 GiB              1.2 GiB
    glm4.5-106b   0.14             0.65           0.18             1.5                6.1 GiB             0.8 GiB
    qwen3-next    0.18             0.82           0.07             0.7                6.9 GiB             0.9 GiB

    padded all-to-all  has room for T·min(k, E/n) rows between any two ranks: n·min(k, E/n)/k times the elements, 8 times in these
                       profiles, 2 to 4 times for Mixtral on 2 and 8 ranks, whose exchanges take 0.1 to 0.2 ms
    all-gather         gives every rank all tokens: n/k of the elements, here 0.8 to 1. A rank may then have to compute
                       n·T·min(k, E/n) rows, and its tables of rows and [gate, up] must have room for them: n times the memory
    bounded tables     a step whose load exceeds them has to be repeated on all ranks

Exchanges that read the numbers on the device (torch's `all_to_all_vdev`, with NVSHMEM) need the tables of an all-gather, too.

On GPUs in bf16, one kernel computes a product for all experts (`grouped.py`). Elsewhere the experts run one after the other, so
that each one's intermediate results stay in the cache (`sequential.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallel import mesh
from parallel.activation_checkpointing import always_save, computed_once
from parallel.experts import exchange, grouped, sequential
from parallel.experts.activations import ACTIVATIONS
from parallel.experts.exchange import Exchange, Routes
from parallel.experts.pending import Pending
from parallel.mesh import Axis
from parallel.torch_internals import custom_op

Update = tuple[Tensor, Tensor]
"""The factors A (experts, r, i) and B (experts, o, r), scaled, of the low-rank updates B A of weights (experts, o, i)."""


# Arguments of several operators: the fields of `Routes` and of `sequential.Parameters`, and the expert axis.
_ROUTES = "Tensor order, Tensor positions, Tensor received, Tensor splits"
_BASE = "Tensor gate_up, Tensor down, Tensor? gate_up_bias, Tensor? down_bias"
_PARAMETERS = f"{_BASE}, Tensor? gate_up_a, Tensor? gate_up_b, Tensor? down_a, Tensor? down_b"
_AXIS = "str axis, SymInt size"


class _Sent(NamedTuple):
    """Exchanges of backward that are under way."""

    rows: Any  # a tensor, or None if forward saved the rows
    grads: Tensor


class _Counted(NamedTuple):
    """A pass that counts choices leaves these for training with the same choices."""

    indices: Tensor  # (T, k) int16
    splits: Tensor  # of `Routes`


_outputs: Pending[Tensor] = Pending()  # that return to their tokens, of forward
_sent: Pending[_Sent] = Pending()
counted: Pending[_Counted] = Pending()  # by layer, of each microbatch in their order


def route(
    indices: Tensor, local: int, axis: Axis, layer: Tensor | None = None, counting: bool = False
) -> tuple[Tensor, Routes]:
    """The choices (T, k) of experts, and where their rows go.

    The host waits for the numbers of rows once for a microbatch, even if a pass without gradients counts its choices first:
    training then takes that pass's choices, which otherwise could differ in rounding.

    Args:
        local: experts per rank.
        layer: a tensor that stands for the layer if its choices are counted before training; None: they are not.
        counting: whether this is the pass that counts.
    """
    *routes, chosen = computed_once(_order, indices, local, axis.name, axis.size, layer, counting)
    return indices if layer is None or counting else chosen, Routes(*routes)


def start_experts(
    x: Tensor,
    weights: Tensor,
    routes: Routes,
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
) -> Callable[[], Tensor]:
    """Start to compute the weighted sum of the outputs of each token's experts.

    Args:
        x: (T, h).
        weights: (T, k), in any float dtype.
        routes: of `route`.
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
        A function that returns the sum, (T, h). On several ranks, what runs before it is called, and its backward, run beside an
        exchange.
    """
    optional = (gate_up_bias, down_bias, *(gate_up_update or (None, None)), *(down_update or (None, None)))
    keep = keep and axis.size > 1 and not torch.compiler.is_compiling()
    result, *_ = _experts(
        x, weights, *routes, gate_up, down, *optional, axis.name, axis.size, activation, keep
    )
    if axis.size == 1:
        return lambda: result
    return lambda: _sum(result, x, weights, *routes, axis.name, axis.size, keep)


def routed_experts(
    x: Tensor, weights: Tensor, indices: Tensor, gate_up: Tensor, down: Tensor, axis: Axis, **options: Any
) -> Tensor:
    """Weighted sum (T, h) of the outputs of each token's experts.

    Args:
        indices: (T, k) numbers of experts among all n·E/n; other arguments as for `start_experts`.
    """
    _, routes = route(indices, len(gate_up), axis)
    return start_experts(x, weights, routes, gate_up, down, axis, **options)()


def scratch_bytes(x: Tensor, choices: int, gate_up: Tensor, backward: bool, updated: bool) -> int:
    """Bytes that a call allocates besides its results, if the load is balanced.

    Args:
        choices: T·k.
        updated: whether the weights have updates.
    """
    f, h = gate_up.shape[1] // 2, x.shape[1]
    # Forward: rows, [gate, up], their activation, outputs. Backward, at most: rows and gradients before and after the exchange,
    # and the rows' gradients; [gate, up], the activation, and the gradients of both.
    elements = 6 * h + 6 * f if backward else 3 * h + 3 * f
    # One product of an update at a time, before it is added.
    return choices * (elements + updated * max(h, 2 * f)) * x.element_size()


@custom_op("trainshed::expert_order")
def _order(
    indices: Tensor, local: int, axis: str, size: int, layer: Tensor | None, counting: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The fields of `Routes`; in training, if choices are counted, also those that were counted.

    `splits` is empty on one rank, and incomplete until `experts` has run, unless choices were counted.
    """
    repeats = layer is not None and not counting
    known = counted.take(layer) if layer is not None and repeats else None
    chosen = indices.clone() if known is None else known.indices.to(indices.dtype)
    over, splits = mesh.registered_axis(axis, size), None if known is None else known.splits
    routes = exchange.sort_by_expert(chosen, local, over, splits)
    if layer is not None and counting:
        counted.put(layer, _Counted(indices.to(torch.int16), routes.splits))
    return *routes, chosen if repeats else indices.new_empty(0)


@_order.register_fake
def _(
    indices: Tensor, local: int, axis: str, size: int, layer: Tensor | None, counting: bool
) -> tuple[Tensor, ...]:
    order = indices.new_empty(indices.numel(), dtype=torch.int32)
    splits = indices.new_empty((2, size) if size > 1 else 0, device="cpu")
    chosen = indices.new_empty(0) if layer is None or counting else torch.empty_like(indices)
    return order, torch.empty_like(indices, dtype=torch.int32), indices.new_empty(size, local), splits, chosen


@custom_op(
    "trainshed::experts",
    f"(Tensor x, Tensor weights, {_ROUTES}, {_PARAMETERS}, {_AXIS}, str activation, bool keep) -> (Tensor, Tensor, Tensor)",
)
def _experts(x: Tensor, weights: Tensor, *more: Any) -> tuple[Tensor, Tensor, Tensor]:
    """y, and tensors for backward, empty if not saved; on several expert ranks, what stands for y's terms.

    Saved are [gate, up] of the rows, without biases if products are grouped, on one expert rank or with `keep`; and the rows,
    with `keep`.
    """
    axis, size, activation, keep = more[12:]
    moves, parameters = _exchange(more[:4], axis, size), sequential.Parameters(*more[4:12])
    rows = moves.receive(moves.send(moves.gather(x)))  # (m, h)
    if grouped.has_kernel(parameters):
        hidden, out = grouped.forward(rows, parameters, moves, activation)  # (m, 2f), (m, h)
    else:
        hidden, out = sequential.forward(rows, parameters, moves.ranges(), ACTIVATIONS[activation])
    rows = rows if keep else x.new_empty(0)
    hidden = hidden if size == 1 or keep else x.new_empty(0)
    if size == 1:
        return moves.sum_over_tokens(out, weights), hidden, rows  # (T, h)
    return _outputs.put(x.new_empty(1), moves.send_back(out)), hidden, rows


@_experts.register_fake
def _(x: Tensor, weights: Tensor, order: Tensor, *more: Any) -> tuple[Tensor, ...]:
    gate_up, (size, _, keep) = more[3], more[-3:]
    rows = order.numel()  # if the load is balanced; in graphs, where sizes must be right, `keep` is false
    hidden = x.new_empty(rows, gate_up.shape[1]) if size == 1 or keep else x.new_empty(0)
    kept = x.new_empty(rows, x.shape[1]) if keep else x.new_empty(0)
    return torch.empty_like(x) if size == 1 else x.new_empty(1), hidden, kept


def _exchange(routes: Sequence[Tensor], axis: str, size: int) -> Exchange:
    """The exchange of rows over a registered axis; `routes`: the fields of `Routes`."""
    return Exchange(Routes(*routes), mesh.registered_axis(axis, size))


@custom_op(
    "trainshed::experts_sum",
    f"(Tensor terms, Tensor x, Tensor weights, {_ROUTES}, {_AXIS}, bool keep) -> Tensor",
)
def _sum(terms: Tensor, x: Tensor, weights: Tensor, *more: Any) -> Tensor:
    """y (T, h), whose terms return from several ranks; `keep`: backward need not send rows again."""
    *routes, axis, size, _ = more
    moves = _exchange(routes, axis, size)
    return moves.sum_over_tokens(moves.receive_back(_taken(_outputs, terms)), weights)


@_sum.register_fake
def _(terms: Tensor, x: Tensor, *more: Any) -> Tensor:
    return torch.empty_like(x)


@custom_op("trainshed::experts_send", f"(Tensor grad, Tensor? x, {_ROUTES}, {_AXIS}) -> Tensor")
def _send(grad: Tensor, x: Tensor | None, *more: Any) -> Tensor:
    """Start to send gradients (T, h), and x (T, h) if given, to the experts; returns what stands for them."""
    *routes, axis, size = more
    moves = _exchange(routes, axis, size)
    rows = None if x is None else moves.send(moves.gather(x))
    return _sent.put(grad.new_empty(1), _Sent(rows, moves.send(moves.gather(grad))))


@_send.register_fake
def _(grad: Tensor, *_: Any) -> Tensor:
    return grad.new_empty(1)


def _taken(pending: Pending[Any], tensor: Tensor) -> Any:
    found = pending.take(tensor)
    if found is None:
        raise RuntimeError("experts: an exchange was used twice, or was copied by the compiler")
    return found


@custom_op(
    "trainshed::experts_backward",
    f"(Tensor grad, Tensor x, Tensor weights, {_ROUTES}, {_PARAMETERS}, Tensor? hidden, Tensor? rows, {_AXIS}, str activation, "
    f"bool keep, bool frozen) -> ({', '.join(['Tensor'] * 10)})",
)
def _backward(grad: Tensor, x: Tensor, weights: Tensor, *more: Any) -> tuple[Tensor, ...]:
    """Gradients of x, weights, and `sequential.Parameters`; empty for absent and frozen parameters.

    `grad`: of y (T, h), or what stands for it on several expert ranks.
    """
    hidden, rows, axis, size, activation, _, frozen = more[12:]
    moves, parameters = _exchange(more[:4], axis, size), sequential.Parameters(*more[4:12])
    sent = _Sent(moves.gather(x), moves.gather(grad)) if size == 1 else _taken(_sent, grad)
    scales = moves.send(weights.flatten().index_select(0, moves.order))
    if rows is None:
        rows = moves.receive(sent.rows)
    has_kernel = grouped.has_kernel(parameters)
    if has_kernel and hidden is None:
        hidden = grouped.gate_up(rows, parameters, moves)  # while the gradients arrive
    saved = sequential.Saved(rows, moves.receive(sent.grads), moves.receive(scales), hidden)
    del more, sent, rows, hidden
    returning: list[Tensor] = []

    def send_back(grad_rows: Tensor, grad_scales: Tensor) -> None:
        returning.extend((moves.send_back(grad_rows), moves.send_back(grad_scales)))

    if has_kernel:
        of_parameters = grouped.backward(saved, parameters, moves, activation, frozen, send_back)
    else:
        grad_rows, grad_scales, *of_parameters = sequential.backward(
            saved, parameters, moves.ranges(), ACTIVATIONS[activation], frozen
        )
        send_back(grad_rows, grad_scales)
    grad_x = moves.sum_over_tokens(moves.receive_back(returning[0]))
    grad_weights = moves.receive_back(returning[1])[moves.positions].to(weights.dtype)
    every = (x.new_empty(0) if grad is None else grad for grad in of_parameters)
    return grad_x, grad_weights, *every


@_backward.register_fake
def _(grad: Tensor, x: Tensor, weights: Tensor, *more: Any) -> tuple[Tensor, ...]:
    parameters, frozen = more[4:12], more[-1]  # `Routes` are before them, saved tensors and settings after
    results = [torch.empty_like(x), torch.empty_like(weights)]
    for index, parameter in enumerate(parameters):
        absent = parameter is None or (frozen and index < sequential.BASE_PARAMETERS)
        results.append(x.new_empty(0) if absent else torch.empty_like(parameter))
    return tuple(results)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors, ctx.settings = inputs[:-4], inputs[-4:]
    _, size, _, keep = ctx.settings
    _, hidden, rows = output
    # In graphs of several ranks backward must not depend on results: full activation checkpointing would repeat the operator.
    saved = hidden if size == 1 or keep else None, rows if keep else None
    ctx.save_for_backward(*tensors, *saved)
    ctx.set_materialize_grads(False)  # zeros for the results that are saved
    ctx.given = [tensor is not None for tensor in tensors[6:]]


def _differentiate(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Any, ...]:
    frozen = not ctx.needs_input_grad[6]  # of gate_up; weights and biases are frozen together
    x, weights, *found = _backward(grad.contiguous(), *ctx.saved_tensors, *ctx.settings, frozen)
    needed = [
        given and not (frozen and index < sequential.BASE_PARAMETERS) for index, given in enumerate(ctx.given)
    ]
    found = (gradient if need else None for gradient, need in zip(found, needed, strict=True))
    return x, weights, None, None, None, None, *found, None, None, None, None


def _save_sum(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, x, _, *routes, axis, size, keep = inputs
    ctx.settings = axis, size
    ctx.save_for_backward(None if keep else x, *routes)


def _differentiate_sum(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return _send(grad.contiguous(), *ctx.saved_tensors, *ctx.settings), *[None] * 9


_experts.register_autograd(_differentiate, setup_context=_save)
_sum.register_autograd(_differentiate_sum, setup_context=_save_sum)
always_save(torch.ops.trainshed.experts.default, torch.ops.trainshed.experts_sum.default)
always_save(torch.ops.trainshed.expert_order.default, in_full=True)
