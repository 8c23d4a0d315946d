"""Ring attention over the context axis: each rank keeps its queries, keys and values travel round (arXiv 2310.01889).

Rank r of c holds chunks r and 2c-1-r of the sequence's 2c ("zigzag"), so causal work is equal on all ranks, and with no masked
waste: of the keys that come from rank j,

    j = r    a plain causal square
    j < r    all queries see the first chunk, none the second
    j > r    the second chunk of queries sees both, the first none

Blocks are merged in float32 by their log-sum-exp:

    lse' = log(exp(lse) + exp(lse_j));   out' = out + sigmoid(lse_j - lse) · (out_j - out)

Backward goes round the other way. It begins with the keys that forward ended with, which are kept, and ends with the rank's own,
so every shift, of keys and values and of dk and dv, in float32, behind them, runs beside a block. Bytes a rank sends, of K
and V's B (un-replicated heads, its own tokens): B(c-1) forward; backward B(c-2), and in float32 the elements of B(c-1).

Which half is worked on depends on the rank, and a graph must not: forward and backward are opaque operators that are
handed the axis's registered name, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from parallel import collectives, mesh
from parallel.attention import kernels, tiles
from parallel.mesh import Axis


def zigzag_positions(sequence: int, size: int, rank: int) -> Tensor:
    """Places in the sequence of the tokens that a rank of the context axis holds, (sequence / size) int64, ascending.

    Raises:
        ValueError: the sequence does not divide into 2 · size chunks (any does for size 1).
    """
    if size == 1:
        return torch.arange(sequence)
    _divides("zigzag_positions: sequence", sequence, 2 * size)
    chunks = torch.arange(sequence).chunk(2 * size)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])


def zigzag_split(x: Tensor, size: int, rank: int, dim: int) -> Tensor:
    """The part of x that a rank of the context axis holds: (..., s, ...) -> (..., s/c, ...)."""
    return x.index_select(dim, zigzag_positions(x.shape[dim], size, rank).to(x.device))


def zigzag_unsplit(parts: list[Tensor], dim: int) -> Tensor:
    """The whole again, from the parts of all ranks in order."""
    size, whole = len(parts), torch.cat(parts, dim)
    places = torch.cat([zigzag_positions(whole.shape[dim], size, rank) for rank in range(size)])
    return whole.index_select(dim, places.argsort().to(whole.device))


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    axis: Axis,
    *,
    causal: bool = True,
    scale: float | None = None,
    documents: Tensor | None = None,
    kernel: str | None = None,
) -> Tensor:
    """Grouped-query attention over a sequence that is spread zigzag over the axis.

    Args:
        q: (b, n, s/c, d), this rank's tokens.
        k, v: (b, k, s/c, d), n a multiple of k.
        axis: the context axis, of a mesh with groups.
        causal: whether a token sees itself and earlier ones alone.
        scale: of the scores; 1 / √d by default.
        documents: (b, s/c) integers, the number of each token's document: tokens see their own document's alone.
        kernel: name of a block kernel (attention_kernels.py); the device's own by default.

    Returns:
        (b, n, s/c, d); `transpose(1, 2)` of it is contiguous.

    Raises:
        ValueError: before anything is sent: shapes or types that do not go together, a sequence that does not divide into
            2c chunks, an unknown kernel. RuntimeError: a kernel that is absent.
    """
    tiles.check("ring_attention", q, k, v, documents)
    if axis.size > 1:
        _divides("ring_attention: dim 2 (sequence, over all ranks)", q.shape[2] * axis.size, 2 * axis.size)
    name = kernel or kernels.default(q)
    kernels.kernel(name)
    if documents is not None:
        documents = collectives.all_gather(documents, axis).unflatten(0, (axis.size, -1))  # (c, b, s/c)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return _ring(q, k, v, documents, axis.name, axis.size, causal, scale, name)[0]


def _divides(what: str, sequence: int, chunks: int) -> None:
    if sequence == 0 or sequence % chunks:
        below = sequence // chunks * chunks
        nearest = ", ".join(str(length) for length in (below, below + chunks) if length)
        raise ValueError(
            f"{what} is {sequence}, which does not divide into {chunks} chunks; nearest: {nearest}"
        )


def _steps(axis: Axis, length: int, causal: bool) -> Iterator[tuple[int, slice, slice, bool]]:
    """Whose keys a rank works on at each step, which of its queries see which of them, and whether causally."""
    everything, first, second = slice(None), slice(0, length // 2), slice(length // 2, None)
    yield axis.rank, everything, everything, causal
    for step in range(1, axis.size):
        source = (axis.rank - step) % axis.size
        if not causal:
            yield source, everything, everything, False
        elif source < axis.rank:
            yield source, everything, first, False
        else:
            yield source, second, everything, False


def _documents(
    documents: Tensor | None, rank: int, rows: slice, source: int, keys: slice
) -> tiles.Documents | None:
    return None if documents is None else (documents[rank][:, rows], documents[source][:, keys])


@torch.library.custom_op("trainshed::ring_attention", mutates_args=())
def _ring(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    axis: str,
    size: int,
    causal: bool,
    scale: float,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse, and the keys and values that came last, the next rank's: (2, b, k, s/c, d), none on a single rank."""
    ring, block = mesh.registered(axis, size), kernels.kernel(kernel)
    b, n, s, d = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(b, s, n, d, dtype=wide).transpose(1, 2)
    lse = q.new_empty(b, n, s, dtype=wide)
    kv = torch.stack((k, v))  # (2, b, k, s/c, d)
    for step, (source, rows, keys, square) in enumerate(_steps(ring, s, causal)):
        if step + 1 < size:
            following = collectives.start_shift(kv, ring)
        seen = _documents(documents, ring.rank, rows, source, keys)
        own_out, own_lse = out[:, :, rows], lse[:, :, rows]
        for part, part_out, part_lse in tiles.forward(
            block, q[:, :, rows], *kv[:, :, :, keys].unbind(), square, scale, seen
        ):
            if step == 0:  # with itself, so every query has seen a key
                own_out[:, :, part], own_lse[:, :, part] = part_out, part_lse
            else:
                _merge(own_out[:, :, part], own_lse[:, :, part], part_out, part_lse)
        if step + 1 < size:
            kv = collectives.wait(following)
    return out.to(q.dtype), lse, kv if size > 1 else kv.new_empty(0)


def _merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Take a further block's result in; lse is finite."""
    weight = torch.sigmoid(more_lse - lse).unsqueeze(-1)
    out.lerp_(more.to(out.dtype), weight)
    torch.logaddexp(lse, more_lse, out=lse)


@_ring.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, documents: Any, axis: Any, size: int, *_: Any) -> tuple[Tensor, ...]:
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
    kernel: str,
) -> tuple[Tensor, Tensor]:
    ring, block = mesh.registered(axis, size), kernels.kernel(kernel)
    dq = torch.zeros_like(out, dtype=lse.dtype)

    def work(k: Tensor, v: Tensor, source: int, rows: slice, keys: slice, square: bool) -> Tensor:
        """Adds to dq; dk and dv of these keys, (2, b, k, s/c, d) in float32."""
        seen = _documents(documents, ring.rank, rows, source, keys)
        known = (x[:, :, rows] for x in (grad, q))
        final = (x[:, :, rows] for x in (out, lse))
        dkv = torch.zeros(2, *k.shape, dtype=lse.dtype, device=k.device)
        own_dq, (dk, dv) = dq[:, :, rows], dkv[:, :, :, keys].unbind()
        for part, columns, (part_q, part_k, part_v) in tiles.backward(
            block, *known, k[:, :, keys], v[:, :, keys], *final, square, scale, seen
        ):
            own_dq[:, :, part] += part_q
            dk[:, :, columns] += part_k
            dv[:, :, columns] += part_v
        return dkv

    home, *others = _steps(ring, q.shape[2], causal)
    arriving: Tensor | None = None
    for left, step in zip(range(size - 2, -1, -1), reversed(others), strict=True):
        if left:
            following = collectives.start_shift(last, ring, -1)
        dkv = work(*last.unbind(), *step)
        if arriving is not None:
            dkv += collectives.wait(arriving)
        arriving = collectives.start_shift(
            dkv, ring, -1
        )  # on to whoever has these keys next, in the end their owner
        if left:
            last = collectives.wait(following)
    own = work(k, v, *home)
    if arriving is not None:
        own += collectives.wait(arriving)
    return dq.to(q.dtype), own.to(k.dtype)


@_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, last: Tensor, out: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(out), k.new_empty(2, *k.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, documents, *ctx.settings = inputs
    out, lse, last = output
    ctx.save_for_backward(q, k, v, last, out, lse, documents)


def _differentiate(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Any, ...]:
    dq, dkv = _backward(grad, *ctx.saved_tensors, *ctx.settings)
    return dq, *dkv.unbind(), *(None,) * (1 + len(ctx.settings))


_ring.register_autograd(_differentiate, setup_context=_keep)
