"""Context-parallel attention in the graph: all-gathered keys and values, work balanced as in the ring.

For devices that compile each operator at its first use and so support no opaque operators (as ring.py's are). Which half of the
blocks a ring computes depends on the rank, and a graph must not. So here each rank computes, besides the two causal squares of
its own chunks, 2c - 1 pairs of a chunk of queries and an earlier chunk of keys, which it selects by its rank in a tensor. Rank r
has chunks r and 2c-1-r:

    pair m of 1 … 2c-1      queries     keys
    m <= r                  r           r - m
    m > r                   2c-1-r      2c-1-m

So each of the two chunks of queries meets every earlier chunk of keys once. Results are merged by their log-sum-exp (zigzag.py);
only documents need a mask. With a sliding window, there is a pair m for each of the two chunks of queries, with the keys m
chunks earlier, as far as the window reaches; pairs before the start of the sequence are ignored.

Bytes that a rank sends, with B the bytes of its K and V (KV heads not repeated): B(c-1) in forward; in backward, which gathers
again, B(c-1) and the elements of B(c-1) in float32. Gathered K and V take cB while a layer runs. Scores exist for one tile of
rows and one chunk of keys at a time (tiles.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from parallel import collectives
from parallel.activation_checkpointing import saving_outputs
from parallel.attention import kernels, tiles
from parallel.attention.kernels import Kernel, Math
from parallel.attention.sinks import merge_sinks, sink_gradient
from parallel.attention.tiles import AttentionOptions, Visibility
from parallel.attention.zigzag import check_sequence, merge
from parallel.mesh import Axis


class _ChunkPair(NamedTuple):
    """One of this rank's two chunks of queries, and an earlier chunk of keys."""

    first: Tensor | None  # (1) whether the queries are the first chunk; None: never
    second: Tensor | None  # the same for the second
    keys: Tensor  # (1) number of the chunk of keys in the sequence
    distance: int = 0  # of the queries from the keys; read with a window only

    def queries(self, chunks: tuple[Tensor, ...]) -> Tensor:
        """The one of a tensor's two chunks that has the pair's queries."""
        first, second = chunks
        if self.first is None or self.second is None:
            return second if self.first is None else first
        return torch.where(self.first, first, second)

    @property
    def counts(self) -> Tensor | None:
        """(1) whether the keys are part of the sequence; None: always."""
        if self.first is None or self.second is None:
            return self.second if self.first is None else self.first
        return None


def gathered_attention(q: Tensor, k: Tensor, v: Tensor, axis: Axis, options: AttentionOptions) -> Tensor:
    """Attention over a context axis that names a kernel; arguments, result and errors of `ring_attention`."""
    tiles.check_inputs("gathered_attention", q, k, v, options)
    check_sequence("gathered_attention", q, axis)
    causal, _, documents, window, sinks, soft_cap = options
    scale = options.score_scale(q)
    rank, every = _rank(q, axis), _gather_documents(documents, axis)
    kernel = kernels.soft_capped(axis.graph_kernel or kernels.default_kernel(q), soft_cap)
    return _Gathered.apply(q, k, v, documents, every, rank, sinks, axis, causal, scale, window, kernel)


def max_scores(kernel: Math, q: Tensor, k: Tensor, axis: Axis, options: AttentionOptions) -> Iterator[Tensor]:
    """Yield the largest scores of this rank's query heads, (n), in parts; see `gathered_attention`."""
    check_sequence("max_scores", q, axis)
    (causal, _, documents, window, _, _), scale = options, options.score_scale(q)
    masks = _Masks(causal, window, documents, _gather_documents(documents, axis))
    queries, own = q.chunk(2, 2), torch.stack(k.chunk(2, 2))  # (2, b, k, s/2c, d)
    every = _gather(own, axis)  # (2c, b, k, s/2c, d)
    for i, (x, keys) in enumerate(zip(queries, own.unbind(), strict=True)):
        yield from tiles.max_scores(kernel, x, keys, scale, masks.own(i))
    for pair in masks.pairs(_rank(q, axis), axis.size, queries[0].shape[2]):
        x, keys = pair.queries(queries), every.index_select(0, pair.keys)[0]
        for found in tiles.max_scores(kernel, x, keys, scale, masks.of(pair)):
            yield found if pair.counts is None else found.where(pair.counts, -torch.inf)


class _Gathered(Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Tensor | None,
        every: Tensor | None,
        rank: Tensor,
        sinks: Tensor | None,
        *settings: Any,
    ) -> Tensor:
        ctx.settings = axis, causal, scale, window, name = settings
        kernel = kernels.get_kernel(name)
        queries, masks = q.chunk(2, 2), _Masks(causal, window, documents, every)
        kv = _chunks(k, v)  # (2, 2, b, k, s/2c, d)
        gathered = _gather(kv, axis)  # (2c, 2, b, k, s/2c, d)
        merged = [
            _attend(kernel, x, *own.unbind(), scale=scale, visibility=masks.own(i))
            for i, (x, own) in enumerate(zip(queries, kv.unbind(), strict=True))
        ]
        for pair in masks.pairs(rank, axis.size, queries[0].shape[2]):
            keys = gathered.index_select(0, pair.keys)[0]
            out, lse = _attend(
                kernel, pair.queries(queries), *keys.unbind(), scale=scale, visibility=masks.of(pair)
            )
            for counts, total in zip(pair[:2], merged, strict=True):
                if counts is not None:
                    merge(*total, out, lse.where(counts, -torch.inf))
        for total in merged:
            merge_sinks(*total, sinks)
        out, lse = join([out.to(q.dtype) for out, _ in merged], [lse for _, lse in merged])
        ctx.save_for_backward(q, k, v, out, lse, documents, every, rank, sinks)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, documents, every, rank, sinks = ctx.saved_tensors
        axis, causal, scale, window, name = ctx.settings
        kernel = kernels.get_kernel(name)
        # Otherwise a compiler would compute scores and gathered keys of backward in forward, and save them.
        q, k = (collectives.depend_on_gradient(x.flatten(1), grad.flatten(1)).view(x.shape) for x in (q, k))
        masks, kv = _Masks(causal, window, documents, every), _chunks(k, v)
        inputs = [x.chunk(2, 2) for x in (grad, q, out, lse)]
        gathered = _gather(kv, axis)
        squares = [
            _differentiate(kernel, *parts, *own.unbind(), scale=scale, visibility=masks.own(i))
            for i, (parts, own) in enumerate(zip(zip(*inputs, strict=True), kv.unbind(), strict=True))
        ]
        dq, dkv = [of_q for of_q, _ in squares], torch.stack([of_kv for _, of_kv in squares])
        pairs = [*masks.pairs(rank, axis.size, dq[0].shape[2])]
        shares = [torch.zeros_like(dkv[0])]
        for pair in pairs:
            keys = gathered.index_select(0, pair.keys)[0]
            parts = (pair.queries(each) for each in inputs)
            of_q, of_kv = _differentiate(
                kernel, *parts, *keys.unbind(), scale=scale, visibility=masks.of(pair)
            )
            shares.append(of_kv)
            for i, counts in enumerate(pair[:2]):
                if counts is not None:
                    dq[i] = dq[i] + of_q.where(counts, 0)
        if pairs:
            total = _by_rank(_sum_shares(torch.stack(shares), pairs, axis.size))
            dkv = dkv + collectives.reduce_scatter(total, axis)  # (2, 2, b, k, s/2c, d)
        dk, dv = dkv.movedim(0, 3).flatten(3, 4).to(k.dtype).unbind()
        return (
            *(torch.cat(dq, 2).to(q.dtype), dk, dv, None, None, None),
            *(sink_gradient(grad, out, lse, sinks), *(None,) * len(ctx.settings)),
        )


class _Masks(NamedTuple):
    """Which keys the queries of this rank's chunks see.

    Attributes:
        local, every: document indices of this rank's tokens (b, s/c) and of each chunk (2c, b, s/2c), or None.
    """

    causal: bool
    window: int | None
    local: Tensor | None
    every: Tensor | None

    def own(self, i: int) -> Visibility:
        """Of the queries and keys of one of this rank's chunks."""
        documents = None if self.local is None else (self.local.chunk(2, 1)[i],) * 2
        return Visibility(self.causal, documents, self.window)

    def of(self, pair: _ChunkPair) -> Visibility:
        """Of a pair's queries and keys."""
        documents = None
        if self.local is not None and self.every is not None:
            documents = pair.queries(self.local.chunk(2, 1)), self.every.index_select(0, pair.keys)[0]
        return Visibility(False, documents, self.window, pair.distance)

    def pairs(self, rank: Tensor, size: int, length: int) -> Iterator[_ChunkPair]:
        """Pairs besides the causal squares of the rank's own chunks of `length` tokens; `rank` is (1)."""
        last, window = 2 * size - 1, self.window
        if self.causal and window is None:
            for m in range(1, last + 1):
                first = rank >= m
                yield _ChunkPair(first, ~first, torch.where(first, rank - m, last - m))
            return
        for i, number in enumerate((rank, last - rank)):
            reach = last if window is None else min((window - 2) // length + 1, last if i else size - 1)
            for m in range(1, reach + 1):
                counts = number >= m if self.causal else number >= 0
                keys = (number - m) % (2 * size)
                yield _ChunkPair(None if i else counts, counts if i else None, keys, m * length)


def _attend(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, *, scale: float, visibility: Visibility
) -> tuple[Tensor, Tensor]:
    """out (b, n, s, d) and lse (b, n, s) of a block, both in float32 or wider."""
    done = [*tiles.forward(kernel, q, k, v, scale, visibility)]
    out, lse = (torch.cat(parts, 2) for parts in ([x for _, x, _ in done], [x for _, _, x in done]))
    unseen = q.shape[2] - out.shape[2]  # last rows, whose window is past the keys
    if unseen:
        out, lse = F.pad(out, (0, 0, 0, unseen)), F.pad(lse, (0, unseen), value=-torch.inf)
    return out.to(lse.dtype), lse


def _differentiate(
    kernel: Kernel,
    grad: Tensor,
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    visibility: Visibility,
) -> tuple[Tensor, Tensor]:
    """dq (b, n, s, d), and dk and dv (2, b, k, t, d) of a block, both in float32 or wider."""
    dq = torch.zeros_like(q, dtype=lse.dtype)
    dkv = torch.zeros(2, *k.shape, dtype=lse.dtype, device=k.device)
    for rows, keys, (tile_dq, tile_dk, tile_dv) in tiles.backward(
        kernel, grad, q, k, v, out, lse, scale, visibility
    ):
        dq[:, :, rows] = tile_dq.to(dq.dtype)
        dkv[0, :, :, keys] += tile_dk
        dkv[1, :, :, keys] += tile_dv
    return dq, dkv


def join(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Concatenate out (b, n, s, d) and lse (b, n, s) of parts of the sequence.

    Selective activation checkpointing saves both: the comparison makes out depend on lse, which is above -inf, since a query sees
    at least its own key.
    """
    # Stored as the output projection reads it.
    out = torch.cat([out.transpose(1, 2) for out in outs], 1).transpose(1, 2)
    with saving_outputs():
        lse = torch.cat([*lses], 2)
    seen = lse[..., None] != -torch.inf  # true of NaN, which must stay
    with saving_outputs():
        out = out.where(seen, 0)
    return out, lse


def _sum_shares(shares: Tensor, pairs: list[_ChunkPair], size: int) -> Tensor:
    """Sum dk and dv by chunk of keys: (1 + pairs, 2, b, k, s/2c, d) -> (2c, 2, b, k, s/2c, d).

    Share 0 is all zeros. A chunk of keys occurs in at most one pair of each chunk of queries. So shares are gathered by index,
    which is deterministic, rather than scattered.
    """
    chunks = torch.arange(2 * size, device=shares.device)[:, None]  # (2c, 1)
    selected: list[Tensor] = []
    for i in (0, 1):
        index = torch.zeros_like(chunks[:, 0])  # (2c)
        for number, pair in enumerate(pairs, 1):
            counts = pair[i]
            if counts is not None:
                index = index + number * (counts & (pair.keys == chunks[:, 0]))
        selected.append(shares.index_select(0, index))
    return selected[0] + selected[1]


def _rank(q: Tensor, axis: Axis) -> Tensor:
    """This rank's on the axis, (1)."""
    return collectives.local_shard(torch.arange(axis.size, dtype=torch.int32, device=q.device), axis)


def _gather_documents(documents: Tensor | None, axis: Axis) -> Tensor | None:
    """Document indices (b, s/c) -> those of each chunk (2c, b, s/2c)."""
    return None if documents is None else _gather(torch.stack(documents.chunk(2, 1)), axis)


def _chunks(k: Tensor, v: Tensor) -> Tensor:
    """(b, k, s/c, d) each -> (2, 2, b, k, s/2c, d): this rank's two chunks of keys and values."""
    return torch.stack((k, v)).unflatten(3, (2, -1)).movedim(3, 0).contiguous()


def _gather(x: Tensor, axis: Axis) -> Tensor:
    """This rank's two chunks of a tensor (2, ...) -> those of the sequence in order (2c, ...)."""
    by_rank = collectives.all_gather(x, axis).unflatten(0, (axis.size, 2))  # (c, 2, ...)
    return torch.cat((by_rank[:, 0], by_rank[:, 1].flip(0)))


def _by_rank(x: Tensor) -> Tensor:
    """Reorder chunks (2c, ...) from sequence order to rank order: the inverse of `_gather`'s reordering."""
    first, second = x.chunk(2)
    return torch.stack((first, second.flip(0)), 1).flatten(0, 1)
