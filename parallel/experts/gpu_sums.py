"""Sums of the rows of each token's experts on NVIDIA GPUs, in one Triton kernel.

It reads each row once and adds in float32. Operators one by one would write the rows in the order of tokens, their products with
the weights in float32, and read both again. Import only where Triton is installed, as with torch's CUDA builds.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # columns that a program computes


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
