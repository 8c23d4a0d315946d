"""Ring attention (arXiv 2310.01889): keys and values move around the context axis, queries stay.

Rank r of c holds chunks r and 2c-1-r of the sequence's 2c (zigzag), which balances causal work without computing masked blocks.
For the keys of rank j:

    j = r    a causal square
    j < r    all queries see the first chunk, none the second
    j > r    the second chunk of queries sees both chunks, the first none

Blocks are merged in float32 by their log-sum-exp:

    lse' = log(exp(lse) + exp(lse_j));   out' = out + sigmoid(lse_j - lse) · (out_j - out)

Backward runs around the ring in reverse, from the last keys of forward, which are saved, to the rank's own, so that every
send/recv, of keys and values and then of their dk and dv in float32, overlaps a block. Bytes that a rank sends, with B the bytes
of its K and V (KV heads not repeated): forward B(c-1); backward B(c-2), and the elements of B(c-1) in float32.

A sliding window masks parts of these blocks, or entire ones; they are then computed by pairs of chunks, and only pairs that the
window reaches. Keys and values still move around the full ring.

The computed half depends on the rank, and graphs must not: forward and backward are opaque operators that take the axis's
registered name, the same on every rank. Devices that support no opaque operators use gathered.py instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallel import collectives, mesh
from parallel.activation_checkpointing import save_outputs
from parallel.attention import kernels, tiles
from parallel.attention.sinks import merge_sinks, sink_gradient
from parallel.mesh import Axis


def zigzag_positions(sequence: int, size: int, rank: int) -> Tensor:
    """Positions of the tokens that a rank of the context axis holds, (sequence / size) int64, ascending.

    Raises:
        ValueError: the sequence is not divisible into 2 · size chunks (unless size is 1).
    """
    if size == 1:
        return torch.arange(sequence)
    _check_divisible("zigzag_positions: sequence", sequence, 2 * size)
    chunks = torch.arange(sequence).chunk(2 * size)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    axis: Axis,
    *,
    causal: bool = True,
    scale: float | None = None,
    documents: Tensor | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    kernel: str | None = None,
) -> Tensor:
    """Grouped-query attention over a sequence sharded in zigzag order over the axis.

    Args:
        q: (b, n, s/c, d), this rank's tokens.
        k, v: (b, k, s/c, d), n a multiple of k.
        axis: context axis, of a mesh with process groups.
        causal: whether tokens attend only to themselves and earlier tokens.
        scale: of the scores; None: 1 / √d.
        documents: (b, s/c) integers, each token's document index; tokens attend only within their document.
        window: number of keys, up to its own position, that a query of causal attention sees; None: all.
        sinks: (n) scores that join each query head's softmax without a value (sinks.py).
        kernel: name of a kernel (kernels.py); None: the device's default.

    Returns:
        (b, n, s/c, d); its `transpose(1, 2)` is contiguous.

    Raises:
        ValueError: before any communication: mismatched shapes or dtypes, a sequence that is not divisible into 2c chunks, or
            an unknown kernel.
    """
    tiles.check_inputs("ring_attention", q, k, v, causal, documents, window, sinks)
    if axis.size > 1:
        check_sequence("ring_attention", q, axis)
    name = kernel or kernels.default_kernel(q)
    kernels.get_kernel(name)
    if documents is not None:
        documents = collectives.all_gather(documents, axis).unflatten(0, (axis.size, -1))  # (c, b, s/c)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return _ring(q, k, v, documents, sinks, axis.name, axis.size, causal, scale, window, name)[0]


def check_sequence(function: str, q: Tensor, axis: Axis) -> None:
    """Raise ValueError naming the function unless the sequence of q (b, n, s/c, d) divides into 2c chunks."""
    _check_divisible(f"{function}: dim 2 (sequence, over all ranks)", q.shape[2] * axis.size, 2 * axis.size)


def _check_divisible(name: str, sequence: int, chunks: int) -> None:
    if sequence == 0 or sequence % chunks:
        below = sequence // chunks * chunks
        nearest = ", ".join(str(length) for length in (below, below + chunks) if length)
        raise ValueError(
            f"{name} is {sequence}, which is not divisible into {chunks} chunks; nearest valid: {nearest}"
        )


class _Area(NamedTuple):
    """Queries of this rank and the keys of another that they see; `causal`, `distance` as in tiles.py."""

    rows: slice
    keys: slice
    causal: bool
    distance: int = 0


def _steps(axis: Axis, length: int, causal: bool, window: int | None) -> Iterator[tuple[int, list[_Area]]]:
    """Yield each step's source rank of keys and areas to compute; for own keys, causal squares first."""
    everything, first, second = slice(None), slice(0, length // 2), slice(length // 2, None)
    for step in range(axis.size):
        source = (axis.rank - step) % axis.size
        if window is not None and axis.size > 1:
            yield source, [*_areas_in_window(axis, source, length // 2, window)]
        elif step == 0 or not causal:
            yield source, [_Area(everything, everything, causal)]
        elif source < axis.rank:
            yield source, [_Area(everything, first, False)]
        else:
            yield source, [_Area(second, everything, False)]


def _areas_in_window(axis: Axis, source: int, chunk: int, window: int) -> Iterator[_Area]:
    """Pairs of a chunk of queries and one of the same or earlier keys, some of which are in the window."""
    halves = slice(0, chunk), slice(chunk, None)
    queries, keys = ((rank, 2 * axis.size - 1 - rank) for rank in (axis.rank, source))  # numbers of chunks
    pairs = [(i, j, (queries[i] - keys[j]) * chunk) for i in (0, 1) for j in (0, 1)]
    for i, j, distance in sorted(pairs, key=lambda pair: pair[2]):
        if 0 <= distance < window + chunk - 1:
            yield _Area(halves[i], halves[j], distance == 0, distance)


def _document_pair(
    documents: Tensor | None, rank: int, rows: slice, source: int, keys: slice
) -> tiles.Documents | None:
    return None if documents is None else (documents[rank][:, rows], documents[source][:, keys])


@torch.library.custom_op("trainshed::ring_attention", mutates_args=())
def _ring(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    sinks: Tensor | None,
    axis: str,
    size: int,
    causal: bool,
    scale: float,
    window: int | None,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse, and the next rank's K and V (2, b, k, s/c, d), received last; empty on a single rank."""
    ring, block = mesh.registered_axis(axis, size), kernels.get_kernel(kernel)
    b, n, s, d = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(b, s, n, d, dtype=wide).transpose(1, 2)
    lse = q.new_empty(b, n, s, dtype=wide)
    kv = torch.stack((k, v))  # (2, b, k, s/c, d)
    for step, (source, areas) in enumerate(_steps(ring, s, causal, window)):
        if step + 1 < size:
            incoming = collectives.start_ring_send_recv(kv, ring)
        for rows, keys, square, distance in areas:
            pair = _document_pair(documents, ring.rank, rows, source, keys)
            visibility = tiles.Visibility(square, pair, window, distance)
            rows_out, rows_lse = out[:, :, rows], lse[:, :, rows]
            for tile, tile_out, tile_lse in tiles.forward(
                block, q[:, :, rows], *kv[:, :, :, keys].unbind(), scale, visibility
            ):
                if step == 0 and rows == keys:  # own keys, so every query sees at least one
                    rows_out[:, :, tile], rows_lse[:, :, tile] = tile_out, tile_lse
                else:
                    merge(rows_out[:, :, tile], rows_lse[:, :, tile], tile_out, tile_lse)
        if step + 1 < size:
            kv = collectives.wait(incoming)
    merge_sinks(out, lse, sinks)
    return out.to(q.dtype), lse, kv if size > 1 else kv.new_empty(0)


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Merge a block's result into out and lse in place; lse must be finite."""
    weight = torch.sigmoid(block_lse - lse).unsqueeze(-1)
    out.lerp_(block_out.to(out.dtype), weight)
    torch.logaddexp(lse, block_lse, out=lse)


@_ring.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, documents: Any, sinks: Any, axis: Any, size: int, *_: Any
) -> tuple[Tensor, ...]:
    b, n, s, d = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    last = k.new_empty(2, *k.shape) if size > 1 else k.new_empty(0)
    return q.new_empty(b, s, n, d).transpose(1, 2), q.new_empty(b, n, s, dtype=wide), last


@torch.library.custom_op("trainshed::ring_attention_backward", mutates_args=())
def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    last: Tensor,
    out: Tensor,
    lse: Tensor,
    documents: Tensor | None,
    axis: str,
    size: int,
    causal: bool,
    scale: float,
    window: int | None,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    ring, block = mesh.registered_axis(axis, size), kernels.get_kernel(kernel)
    dq = torch.zeros_like(out, dtype=lse.dtype)

    def block_backward(k: Tensor, v: Tensor, source: int, areas: list[_Area]) -> Tensor:
        """Add a block's share to dq and return its dk and dv (2, b, k, s/c, d) in float32."""
        dkv = torch.zeros(2, *k.shape, dtype=lse.dtype, device=k.device)
        for rows, keys, square, distance in areas:
            pair = _document_pair(documents, ring.rank, rows, source, keys)
            queries = (x[:, :, rows] for x in (grad, q))
            final = (x[:, :, rows] for x in (out, lse))
            rows_dq, (dk, dv) = dq[:, :, rows], dkv[:, :, :, keys].unbind()
            for tile, columns, (tile_dq, tile_dk, tile_dv) in tiles.backward(
                *(block, *queries, k[:, :, keys], v[:, :, keys], *final),
                *(scale, tiles.Visibility(square, pair, window, distance)),
            ):
                rows_dq[:, :, tile] += tile_dq
                dk[:, :, columns] += tile_dk
                dv[:, :, columns] += tile_dv
        return dkv

    first, *others = _steps(ring, q.shape[2], causal, window)
    arriving: Tensor | None = None
    for remaining, step in zip(range(size - 2, -1, -1), reversed(others), strict=True):
        if remaining:
            incoming = collectives.start_ring_send_recv(last, ring, -1)
        dkv = block_backward(*last.unbind(), *step)
        if arriving is not None:
            dkv += collectives.wait(arriving)
        # To the rank that processes these keys next, finally to their owner.
        arriving = collectives.start_ring_send_recv(dkv, ring, -1)
        if remaining:
            last = collectives.wait(incoming)
    dkv = block_backward(k, v, *first)
    if arriving is not None:
        dkv += collectives.wait(arriving)
    return dq.to(q.dtype), dkv.to(k.dtype)


@_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, last: Tensor, out: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(out), k.new_empty(2, *k.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, documents, sinks, *ctx.settings = inputs
    out, lse, last = output
    ctx.save_for_backward(q, k, v, last, out, lse, documents, sinks)


def _differentiate(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Any, ...]:
    *saved, out, lse, documents, sinks = ctx.saved_tensors
    dq, dkv = _backward(grad, *saved, out, lse, documents, *ctx.settings)
    return dq, *dkv.unbind(), None, sink_gradient(grad, out, lse, sinks), *(None,) * len(ctx.settings)


_ring.register_autograd(_differentiate, setup_context=_setup_context)
save_outputs(torch.ops.trainshed.ring_attention.default)
