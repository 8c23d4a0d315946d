"""Activations of experts, and sums of the rows of each token's experts, as Triton kernels for GPUs.

Activations have the formulas of activations.py, of products without their biases: a kernel, one for forward and one for backward,
reads each element once, adds the bias of the row's expert and computes in float32, where operators one by one would read and
write (rows, f) a dozen times in backward. A program computes one row. The kernel of sums reads each row once and adds in float32;
operators one by one would write the rows in the order of tokens, their products with the weights in float32, and read both again.

How many rows there are depends on the data, so the kernels cannot be part of a graph that is compiled ahead: Triton compiles each
at its first call and keeps it in Triton's cache. Import only where Triton is installed, as with torch's CUDA builds.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from parallel.experts.activations import ALPHA, CLAMP

KINDS = {"silu": 0, "gelu": 1, "clamped_silu": 2}  # of activations.ACTIVATIONS
BLOCK = 1024  # columns that a program computes at a time

_LIMIT, _SLOPE = tl.constexpr(CLAMP), tl.constexpr(ALPHA)
_SILU, _GELU = tl.constexpr(KINDS["silu"]), tl.constexpr(KINDS["gelu"])


def forward(product: Tensor, activation: str, bias: Tensor | None, owners: Tensor | None) -> Tensor:
    """Outputs (m, f) of products (m, 2f), [gate, up].

    Args:
        activation: one of `KINDS`.
        bias: (experts, 2f), added to the products; None if the experts have none.
        owners: (m) int, each row's expert; not needed without biases.
    """
    out = product.new_empty(len(product), product.shape[1] // 2)
    if len(product):
        _forward[(len(product),)](product, bias, owners, out, out.shape[1], **_options(out, activation, bias))
    return out


def backward(
    grad: Tensor, product: Tensor, scale: Tensor, activation: str, bias: Tensor | None, owners: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Like `Activation.backward`, of products without their biases.

    Args:
        grad: (m, f), gradient of the scaled outputs; overwritten by the scaled outputs.
        scale: (m).
        product, activation, bias, owners: as for `forward`.

    Returns:
        scaled outputs (m, f); <grad, output> (m) float32, the gradient of the scale; gradient (m, 2f) of the products.
    """
    sums = torch.empty(len(grad), dtype=torch.float32, device=grad.device)
    gradient = torch.empty_like(product)
    if len(grad):
        tensors = product, bias, owners, grad, scale, sums, gradient
        _backward[(len(grad),)](*tensors, grad.shape[1], **_options(grad, activation, bias))
    return grad, sums, gradient


def _options(rows: Tensor, activation: str, bias: Tensor | None) -> dict[str, Any]:
    block = min(BLOCK, triton.next_power_of_2(rows.shape[1]))
    return {"KIND": KINDS[activation], "BIASED": bias is not None, "BLOCK": block}


@triton.jit
def _load(
    product: tl.tensor, bias: tl.tensor, owners: tl.tensor, row: tl.tensor, columns: tl.tensor, inside: tl.tensor, f: tl.tensor,
    BIASED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """[gate, up] of a row's columns, in float32."""
    gate = tl.load(product + row * 2 * f + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(product + row * 2 * f + f + columns, mask=inside, other=0.0).to(tl.float32)
    if BIASED:
        first = tl.load(owners + row).to(tl.int64) * 2 * f
        gate += tl.load(bias + first + columns, mask=inside, other=0.0).to(tl.float32)
        up += tl.load(bias + first + f + columns, mask=inside, other=0.0).to(tl.float32)
    return gate, up


@triton.jit
def _factors(
    gate: tl.tensor, up: tl.tensor, KIND: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """a(gate), a'(gate), b(up), b'(up) of an output a(gate) · b(up)."""
    other, other_slope = up, tl.full(up.shape, 1.0, tl.float32)
    if KIND == _SILU:
        sigmoid = tl.sigmoid(gate)
        active = gate * sigmoid
        slope = sigmoid * (1 + gate * (1 - sigmoid))
    elif KIND == _GELU:
        below = 0.5 * (1 + tl.erf(gate * 0.7071067811865476))  # of a standard normal distribution
        active = gate * below
        slope = below + gate * 0.3989422804014327 * tl.exp(-0.5 * gate * gate)
    else:
        clamped = tl.minimum(gate, _LIMIT, propagate_nan=tl.PropagateNan.ALL)
        sigmoid = tl.sigmoid(clamped * _SLOPE)
        active = clamped * sigmoid
        slope = tl.where(gate > _LIMIT, 0.0, sigmoid * (1 + clamped * _SLOPE * (1 - sigmoid)))
        other = tl.clamp(up, -_LIMIT, _LIMIT, propagate_nan=tl.PropagateNan.ALL) + 1
        other_slope = tl.where(tl.abs(up) > _LIMIT, 0.0, 1.0)
    return active, slope, other, other_slope


@triton.jit
def _forward(
    product: tl.tensor, bias: tl.tensor, owners: tl.tensor, out: tl.tensor, f: tl.tensor,
    KIND: tl.constexpr, BIASED: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    for start in range(0, f, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < f
        gate, up = _load(product, bias, owners, row, columns, inside, f, BIASED)
        active, _, other, _ = _factors(gate, up, KIND)
        tl.store(out + row * f + columns, (active * other).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    product: tl.tensor, bias: tl.tensor, owners: tl.tensor, grad: tl.tensor, scale: tl.tensor, sums: tl.tensor,
    gradient: tl.tensor, f: tl.tensor, KIND: tl.constexpr, BIASED: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(scale + row).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, f, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < f
        gate, up = _load(product, bias, owners, row, columns, inside, f, BIASED)
        active, slope, other, other_slope = _factors(gate, up, KIND)
        given = tl.load(grad + row * f + columns, mask=inside, other=0.0).to(tl.float32)
        out = active * other
        total += given * out
        given *= factor
        target = gradient + row * 2 * f + columns
        tl.store(target, (given * other * slope).to(gradient.dtype.element_ty), mask=inside)
        tl.store(target + f, (given * active * other_slope).to(gradient.dtype.element_ty), mask=inside)
        tl.store(grad + row * f + columns, (out * factor).to(grad.dtype.element_ty), mask=inside)
    tl.store(sums + row, tl.sum(total))


def sum_rows(rows: Tensor, positions: Tensor, weights: Tensor | None) -> Tensor:
    """Σ over j of weights[t, j] · rows[positions[t, j]], (T, h) in the rows' dtype.

    Args:
        rows: (m, h), contiguous.
        positions: (T, k) int.
        weights: (T, k); None: all 1.
    """
    (tokens, k), h = positions.shape, rows.shape[1]
    out = rows.new_empty(tokens, h)
    if tokens:
        block = min(BLOCK, triton.next_power_of_2(h))
        factors = None if weights is None else weights.contiguous()
        grid = tokens, triton.cdiv(h, block)
        _sum_rows[grid](rows, positions, factors, out, h, K=k, WEIGHTED=weights is not None, BLOCK=block)
    return out


@triton.jit
def _sum_rows(
    rows: tl.tensor, positions: tl.tensor, weights: tl.tensor, out: tl.tensor, h: tl.tensor,
    K: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < h
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(K):
        row = tl.load(positions + token * K + j).to(tl.int64)
        values = tl.load(rows + row * h + columns, mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            values *= tl.load(weights + token * K + j).to(tl.float32)
        total += values
    tl.store(out + token * h + columns, total.to(out.dtype.element_ty), mask=inside)
