"""Grouped-query attention, softmax(scale · q kᵀ) v, full or causal, with documents or sliding windows.

A context axis of several ranks uses ring attention (ring.py), or gathers K and V in the graph if the axis names a kernel for that
(gathered.py); a single rank uses the device's kernel. Kernels that support tiling (CPU) run as one opaque operator, which
compiles under `fullgraph=True` and runs the same code eager and compiled. Other devices use torch's
`scaled_dot_product_attention`, which each backend maps to its fastest kernel.

Documents, windows and sinks (sinks.py) on those devices: FlexAttention where it exists (cuda, flex.py), else the device's kernel
called with bounds, in the graph (neuron). Soft caps: FlexAttention, else the formulas (kernels.py). No device repeats KV
heads or holds an s × s mask for them.

Time relative to scaled_dot_product_attention with repeated KV heads, forward and backward on a CPU with bf16 matrix products
(b 4, n 8, k 2, s 512, d 32, one thread): 0.63 in float32, 0.59 in bf16.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from parallel import collectives
from parallel.activation_checkpointing import always_save
from parallel.attention import kernels, tiles
from parallel.attention.gathered import gathered_attention, join
from parallel.attention.ring import ring_attention
from parallel.attention.sinks import merge_sinks, sink_gradient
from parallel.attention.tiles import AttentionOptions
from parallel.mesh import Axis
from parallel.torch_internals import cudnn_attention, custom_op, efficient_attention, flash_attention


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    axis: Axis | None = None,
    *,
    causal: bool = True,
    scale: float | None = None,
    documents: Tensor | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    soft_cap: float | None = None,
    kernel: str | None = None,
) -> Tensor:
    """Grouped-query attention: query head i reads KV head i // (n / k).

    Args:
        q: (b, n, s, d); over a context axis, s is this rank's zigzag shard.
        k: (b, k, s, d), n a multiple of k.
        v: (b, k, s, d), or narrower heads, which are padded with zeros, as kernels require heads of equal size.
        axis: context axis.
        causal: whether tokens attend only to themselves and earlier tokens.
        scale: of the scores; None: 1 / √d.
        documents: (b, s) integers, each token's document index; tokens attend only within their document.
        window: number of keys, up to its own position, that a query of causal attention sees; None: all.
        sinks: (n) scores that join each query head's softmax without a value (sinks.py).
        soft_cap: c, for scores c · tanh(scores / c); None: none. Kernels without one are replaced by the formulas.
        kernel: name of a kernel (kernels.py); None: the device's default.

    Returns:
        (b, n, s, d), or as wide as v; its `transpose(1, 2)` is contiguous if the operator below computed it and v was not padded.

    Raises:
        ValueError: mismatched shapes or dtypes, a window without `causal`, or an unknown kernel.
    """
    options = AttentionOptions(causal, scale, documents, window, sinks, soft_cap)
    width = v.shape[-1]
    if width < k.shape[-1]:
        v = F.pad(v, (0, k.shape[-1] - width))
        return _attend(q, k, v, axis, options, kernel)[..., :width]
    return _attend(q, k, v, axis, options, kernel)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, axis: Axis | None, options: AttentionOptions, kernel: str | None
) -> Tensor:
    """`attention` with values as wide as keys."""
    causal, _, documents, window, sinks, soft_cap = options
    name = kernel or kernels.default_kernel(q)
    found = kernels.get_kernel(name)
    plain = documents is None and window is None and sinks is None and soft_cap is None
    uses_flex = not plain and found.uses_flex
    if axis is not None and axis.masks_by_flex is not None and kernel is None:
        uses_flex = not plain and axis.masks_by_flex
    graph_kernel = axis.graph_kernel if axis is not None and kernel is None else None
    if axis is not None and axis.size > 1 and not uses_flex:
        if graph_kernel is not None:
            return gathered_attention(q, k, v, axis, options)
        return ring_attention(q, k, v, axis, options, kernel)
    tiles.check_inputs("attention", q, k, v, options)
    scale = options.score_scale(q)
    if uses_flex:
        from parallel.attention.flex import masked_attention  # imports slowly

        return masked_attention(q, k, v, axis, options)
    # In float32, torch's memory-efficient kernel for GPUs takes no grouped KV heads, and its fallback holds s × s scores.
    expands = q.is_cuda and q.dtype == torch.float32 and k.shape[1] < q.shape[1]
    opaque = kernel is not None or found.supports_tiling or expands
    if plain and not opaque:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)
    if not plain and (graph_kernel is not None or not opaque):
        name = kernels.soft_capped(graph_kernel or name, soft_cap)
        return _InGraph.apply(q, k, v, documents, sinks, causal, scale, window, name)
    name = kernels.soft_capped(name, soft_cap)
    return _attention(q, k, v, documents, sinks, causal, scale, window, name)[0]


class _InGraph(Function):
    """Tiled attention as part of the graph, for compilers that support no opaque operators."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *more: Any) -> Tensor:
        documents, sinks, causal, scale, window, kernel = more
        ctx.settings = causal, scale, window, kernel
        visibility = _visibility(documents, causal, window)
        tile_outs, tile_lses = [], []
        for _, out, lse in tiles.forward(kernels.get_kernel(kernel), q, k, v, scale, visibility):
            merge_sinks(out, lse, sinks)
            tile_outs.append(out.to(q.dtype))
            tile_lses.append(lse)
        out, lse = join(tile_outs, tile_lses)
        ctx.save_for_backward(q, k, v, out, lse, documents, sinks)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, documents, sinks = ctx.saved_tensors
        # Otherwise a compiler would compute the scores of backward in forward, and save them.
        q, k = (collectives.depend_on_gradient(x.flatten(1), grad.flatten(1)).view(x.shape) for x in (q, k))
        gradients = _gradients(grad, q, k, v, out, lse, documents, *ctx.settings)
        return *gradients, None, sink_gradient(grad, out, lse, sinks), *(None,) * 4


def _visibility(documents: Tensor | None, causal: bool, window: int | None) -> tiles.Visibility:
    return tiles.Visibility(causal, None if documents is None else (documents, documents), window)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    sinks: Tensor | None,
    causal: bool,
    scale: float,
    window: int | None,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    out, lse = _empty(q)
    visibility = _visibility(documents, causal, window)
    for rows, tile_out, tile_lse in tiles.forward(kernels.get_kernel(kernel), q, k, v, scale, visibility):
        out[:, :, rows], lse[:, :, rows] = tile_out, tile_lse
    merge_sinks(out, lse, sinks)
    return out, lse


_attention = custom_op("trainshed::attention")(_forward)


@_attention.register_fake
def _empty(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Uninitialized out (b, n, s, d), stored as (b, s, n, d) for the output projection, and lse (b, n, s)."""
    b, n, s, d = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(b, s, n, d).transpose(1, 2), q.new_empty(b, n, s, dtype=wide)


def _gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    documents: Tensor | None,
    causal: bool,
    scale: float,
    window: int | None,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    visibility = _visibility(documents, causal, window)
    dq = q.new_empty(out.transpose(1, 2).shape).transpose(1, 2)
    dk, dv = (x.new_zeros(x.shape, dtype=lse.dtype) for x in (k, v))  # sums over tiles
    for rows, keys, (tile_dq, tile_dk, tile_dv) in tiles.backward(
        kernels.get_kernel(kernel), grad, q, k, v, out, lse, scale, visibility
    ):
        dq[:, :, rows] = tile_dq
        dk[:, :, keys] += tile_dk
        dv[:, :, keys] += tile_dv
    return dq, dk.to(k.dtype), dv.to(v.dtype)


_backward = custom_op("trainshed::attention_backward")(_gradients)


@_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(out.transpose(1, 2).shape).transpose(1, 2), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, documents, sinks, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, *output, documents, sinks)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    *inputs, out, lse, documents, sinks = ctx.saved_tensors
    gradients = _backward(grad, *inputs, out, lse, documents, *ctx.settings)
    return *gradients, None, sink_gradient(grad, out, lse, sinks), *(None,) * 4


_attention.register_autograd(_differentiate, setup_context=_setup_context)
always_save(
    torch.ops.trainshed.attention.default,
    # what scaled_dot_product_attention becomes on a GPU
    flash_attention.default,
    cudnn_attention.default,
    efficient_attention.default,
)
