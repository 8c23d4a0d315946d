"""Experts with a capacity: each takes at most C tokens per sample and drops the rest; static shapes.

With s tokens in a sample, C = ⌈factor · s·k / E⌉. Earlier tokens take precedence, so the dropped choices depend on the sample
only, not on the microbatch size or the data and expert degrees; padding, at the end of a sample, takes no slot from a token. A
dropped choice adds nothing to its token's sum; its weight is not redistributed to the others.

A table of E·b·C slots holds the tokens; an all-to-all sends its shards to the ranks that hold the experts, another returns the
results. Unused slots are zeros. Elements that a rank sends: E·b·C·h(n-1)/n, twice in forward and twice in backward.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from parallel import collectives
from parallel.activation_checkpointing import saving_outputs
from parallel.backward import needs_gradient
from parallel.experts.activations import ACTIVATIONS
from parallel.experts.dropless import Update
from parallel.mesh import Axis


def capacity(factor: float, length: int, k: int, experts: int) -> int:
    """C for samples of `length` tokens, at most `length`."""
    return min(length, math.ceil(factor * length * k / experts))


def assign_slots(indices: Tensor, experts: int, length: int, limit: int) -> tuple[Tensor, Tensor]:
    """The slot of each choice, and which choices get one.

    Args:
        indices: (b·length, k) chosen experts.
        limit: C.

    Returns:
        slot (b·length, k) in a table of E·b·C, of expert-major order; kept (b·length, k).
    """
    tokens, k = indices.shape
    b = tokens // length
    choices = indices.view(b, length * k)  # (b, s·k), in order of tokens
    chosen = torch.nn.functional.one_hot(choices, experts)  # (b, s·k, E)
    before = (chosen.cumsum(1) * chosen).sum(-1) - 1  # (b, s·k) earlier choices of the same expert
    sample = torch.arange(b, device=indices.device)[:, None]
    slot = (choices * b + sample) * limit + before
    return slot.view(tokens, k), (before < limit).view(tokens, k)


def slotted_experts(
    x: Tensor,
    weights: Tensor,
    slot: Tensor,
    kept: Tensor,
    slots: int,
    gate_up: Tensor,
    down: Tensor,
    axis: Axis,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    gate_up_update: Update | None = None,
    down_update: Update | None = None,
    activation: str = "silu",
) -> Tensor:
    """`dropless.routed_experts` with `slot` and `kept` of `assign_slots` in place of indices.

    `slots` is the number of slots of all experts.
    """
    tokens, k = slot.shape
    flat = slot.where(kept, slots).flatten()  # (T·k); dropped choices go to one extra slot
    numbers = torch.arange(tokens, device=x.device).repeat_interleave(k)
    source = numbers.new_full((slots + 1,), tokens).scatter(0, flat, numbers)[:-1]  # token in each slot
    padded = torch.cat((x, x.new_zeros(1, x.shape[1])))
    table = _exchange(padded[source], axis)  # (n·E/n·b·C, h), by rank
    local = len(gate_up)
    rows = table.view(axis.size, local, -1, x.shape[1]).transpose(0, 1).flatten(1, 2)  # (E/n, n·b·C, h)
    hidden = _product(rows, gate_up, gate_up_bias, gate_up_update)  # (E/n, n·b·C, 2f)
    hidden = ACTIVATIONS[activation].forward(hidden)  # (E/n, n·b·C, f)
    # The exchange's output is saved, so the product's need not be.
    out = _product(hidden, down, down_bias, down_update, saved=axis.size == 1)  # (E/n, n·b·C, h)
    back = out.unflatten(1, (axis.size, -1)).transpose(0, 1).reshape(table.shape)
    results = torch.cat((_exchange(back, axis), x.new_zeros(1, x.shape[1])))  # (E·b·C + 1, h)
    scaled = results[flat].view(tokens, k, -1) * weights[..., None]
    return scaled.sum(1).to(x.dtype)


def _exchange(x: Tensor, axis: Axis) -> Tensor:
    """`collectives.exchange`, which selective activation checkpointing does not repeat."""
    x = x.contiguous()
    with saving_outputs() if axis.size > 1 else nullcontext():
        return collectives.exchange(x, axis)


def _product(
    rows: Tensor, weight: Tensor, bias: Tensor | None, update: Update | None, saved: bool = True
) -> Tensor:
    """Rows (experts, m, i) times weights (experts, o, i), their biases and updates: -> (experts, m, o).

    Args:
        saved: whether selective activation checkpointing saves the products.
    """
    result = _Product.apply(rows, weight, saved)
    if update is not None:
        a, b = update
        result = result + _Product.apply(_Product.apply(rows, a, saved), b, saved)
    return result if bias is None else result + bias[:, None]


class _Product(Function):
    """Rows (experts, m, i) times weights (experts, o, i) -> (experts, m, o).

    It saves the weights themselves, not their transposes: a graph that gathers weights (optimizer/fsdp.py) then gathers them
    again in backward, where a partitioner that does not recompute transposes would keep all of them.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, saved: bool) -> Tensor:
        ctx.save_for_backward(rows, weight)
        transposed = weight.transpose(1, 2)
        with saving_outputs() if saved else nullcontext():
            return torch.bmm(rows, transposed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, weight = ctx.saved_tensors
        grad_rows = torch.bmm(grad, weight) if needs_gradient(ctx, 0) else None
        grad_weight = torch.bmm(grad.transpose(1, 2), rows) if needs_gradient(ctx, 1) else None
        return grad_rows, grad_weight, None
