"""Ring attention (arXiv 2310.01889): keys and values move around the context axis, queries stay.

The sequence has the zigzag layout of zigzag.py, which computes what a rank does with the keys and values that it holds.

Backward runs around the ring in reverse, from the last keys of forward, which are saved, to the rank's own, so that every
send/recv, of keys and values and then of their dk and dv in float32, overlaps a block. Bytes that a rank sends, with B the bytes
of its K and V (KV heads not repeated): forward B(c-1); backward B(c-2), and the elements of B(c-1) in float32.

With a sliding window, keys and values still move around the full ring.

The computed half depends on the rank, and graphs must not: forward and backward are opaque operators that take the axis's
registered name, the same on every rank. Devices that support no opaque operators use gathered.py instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parallel import collectives, mesh
from parallel.activation_checkpointing import always_save
from parallel.attention import kernels, tiles
from parallel.attention.sinks import merge_sinks, sink_gradient
from parallel.attention.tiles import CAUSAL, AttentionOptions
from parallel.attention.zigzag import RankAttention, check_sequence
from parallel.mesh import Axis
from parallel.torch_internals import custom_op


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    axis: Axis,
    options: AttentionOptions = CAUSAL,
    kernel: str | None = None,
) -> Tensor:
    """Grouped-query attention over a sequence sharded in zigzag order; arguments as for `attention`.

    Args:
        axis: context axis, of a mesh with process groups.

    Returns:
        (b, n, s/c, d); its `transpose(1, 2)` is contiguous.

    Raises:
        ValueError: before any communication: mismatched shapes or dtypes, a sequence that is not divisible into 2c chunks, or
            an unknown kernel.
    """
    tiles.check_inputs("ring_attention", q, k, v, options)
    if axis.size > 1:
        check_sequence("ring_attention", q, axis)
    causal, _, documents, window, sinks, soft_cap = options
    name = kernels.soft_capped(kernel or kernels.default_kernel(q), soft_cap)
    kernels.get_kernel(name)
    if documents is not None:
        documents = collectives.all_gather(documents, axis).unflatten(0, (axis.size, -1))  # (c, b, s/c)
    scale = options.score_scale(q)
    return _ring(q, k, v, documents, sinks, axis.name, axis.size, causal, scale, window, name)[0]


@custom_op("trainshed::ring_attention")
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
    ring = mesh.registered_axis(axis, size)
    rank = RankAttention(ring.rank, size, kernels.get_kernel(kernel), scale, causal, window, documents)
    out, lse = rank.empty_results(q)
    kv = torch.stack((k, v))  # (2, b, k, s/c, d)
    for step, block in enumerate(rank.blocks(q.shape[2])):
        if step + 1 < size:
            incoming = collectives.start_ring_send_recv(kv, ring)
        keys, values = kv.unbind()
        rank.forward(block, q, keys, values, out, lse)
        if step + 1 < size:
            kv = collectives.wait(incoming)
    merge_sinks(out, lse, sinks)
    return out.to(q.dtype), lse, kv if size > 1 else kv.new_empty(0)


@_ring.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, documents: Any, sinks: Any, axis: Any, size: int, *_: Any
) -> tuple[Tensor, ...]:
    b, n, s, d = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    last = k.new_empty(2, *k.shape) if size > 1 else k.new_empty(0)
    return q.new_empty(b, s, n, d).transpose(1, 2), q.new_empty(b, n, s, dtype=wide), last


@custom_op("trainshed::ring_attention_backward")
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
    ring = mesh.registered_axis(axis, size)
    rank = RankAttention(ring.rank, size, kernels.get_kernel(kernel), scale, causal, window, documents)
    dq = torch.zeros_like(out, dtype=lse.dtype)
    first, *others = rank.blocks(q.shape[2])
    arriving: Tensor | None = None
    for remaining, block in zip(range(size - 2, -1, -1), reversed(others), strict=True):
        if remaining:
            incoming = collectives.start_ring_send_recv(last, ring, -1)
        keys, values = last.unbind()
        dkv = rank.backward(block, grad, q, keys, values, out, lse, dq)
        if arriving is not None:
            dkv += collectives.wait(arriving)
        # To the rank that processes these keys next, finally to their owner.
        arriving = collectives.start_ring_send_recv(dkv, ring, -1)
        if remaining:
            last = collectives.wait(incoming)
    dkv = rank.backward(first, grad, q, k, v, out, lse, dq)
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
always_save(torch.ops.trainshed.ring_attention.default)
