"""Overlap of matrix products with the collectives of sequence parallelism, in chunks of tokens.

    gather_product     Y = f(all-gather X)         chunk i + 1 is gathered while chunk i is multiplied
    scatter_product    Y = reduce-scatter f(X)     chunk i is reduced while chunk i + 1 is multiplied

f is a matrix product: each row of its result depends on the same row of its input only. A chunk consists of the same rows of
each rank's shard, so that its collective is an ordinary one of 1/c of the size, and every element of Y is the same sum as without
chunks.

With c chunks, 1/c of the shorter of product and collective stays exposed (arXiv 2105.05720). The cost is a copy of each chunk and
the memory of one. The host never waits: `wait` makes the device's compute stream wait for a collective.

`Axis.chunks` is their number, or None to derive it from the sizes with the constants below, which are estimates for NVLink, not
measured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from parallel import collectives
from parallel.mesh import Axis

Product = Callable[[Tensor], Tensor]

MAX_CHUNKS = 4
MIN_ROWS = 2048  # of a chunk's product, so that its tiles fill the device
MIN_BYTES = 8 << 20  # of a chunk's collective, so that latency is a small part of its duration


def count_chunks(rows: int, row_bytes: int, axis: Axis) -> int:
    """Number of chunks of a product of `rows` gathered rows; the collective moves `row_bytes` for each.

    Returns:
        a divisor of each rank's number of rows.
    """
    most = axis.chunks
    if most is None:
        most = min(MAX_CHUNKS, rows // MIN_ROWS, rows * row_bytes // MIN_BYTES)
    local = rows // axis.size
    return next((count for count in range(most, 1, -1) if local % count == 0), 1)


def gather_product(
    x: Tensor, axis: Axis, product: Product, *, divisible: bool = True, keep: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The product (n·p, m) of X, of which each rank holds (p, k), and X itself (n·p, k) if `keep`.

    Args:
        divisible: whether the product may be computed in chunks.
    """
    chunks = count_chunks(len(x) * axis.size, x.shape[1] * x.element_size(), axis) if divisible else 1
    if chunks == 1:
        gathered = collectives.wait(collectives.start_all_gather(x, axis))
        return product(gathered), gathered if keep else None
    parts = x.chunk(chunks)  # (p/c, k) each
    y: Any = None
    kept: Tensor | None = None
    following = collectives.start_all_gather(parts[0], axis)
    for i in range(chunks):
        pending = following
        if i + 1 < chunks:
            following = collectives.start_all_gather(parts[i + 1], axis)
        gathered = collectives.wait(pending)  # (n·p/c, k)
        y = _write_chunk(y, product(gathered), i, chunks, axis)
        kept = _write_chunk(kept, gathered, i, chunks, axis) if keep else None
    return y.flatten(0, 2), None if kept is None else kept.flatten(0, 2)


def _write_chunk(result: Tensor | None, chunk: Tensor, i: int, chunks: int, axis: Axis) -> Tensor:
    """Copy chunk i (n·p/c, m) to each rank's rows in `result` (n, c, p/c, m), allocated by the first call."""
    chunk = chunk.unflatten(0, (axis.size, -1))  # (n, p/c, m)
    if result is None:
        result = chunk.new_empty(axis.size, chunks, *chunk.shape[1:])
    result[:, i] = chunk
    return result


def scatter_product(x: Tensor, axis: Axis, product: Product, *, width: int, divisible: bool = True) -> Tensor:
    """This rank's rows (p, m) of the sum over the axis of the products of each rank's X (n·p, k).

    Args:
        width: m.
        divisible: whether the product may be computed in chunks.

    Raises:
        ValueError: the axis does not divide dim 0.
    """
    collectives.check_divisible("reduce_scatter", x, axis)
    chunks = count_chunks(len(x), width * x.element_size(), axis) if divisible else 1
    if chunks == 1:
        return collectives.PendingReduceScatter(product(x), axis).wait()
    parts = x.unflatten(0, (axis.size, chunks, -1))  # (n, c, p/c, k)
    pending = [
        collectives.PendingReduceScatter(product(parts[:, i].flatten(0, 1)), axis) for i in range(chunks)
    ]
    return torch.cat([each.wait() for each in pending])
