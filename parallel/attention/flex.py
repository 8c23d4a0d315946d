"""FlexAttention with documents, a window, sinks or a soft cap, compiled into one kernel.

For devices whose flash attention does not support masks. The mask is a formula of positions and document indices, so no s × s
tensor exists: the kernel visits only the blocks of 128 × 128 scores that the window and the documents of their rows and columns
allow, and applies the formula in those that are not fully visible. KV heads are not repeated. All shapes are static and nothing
is read on the host, whatever the number of documents. Sinks (sinks.py) scale the result by the kernel's log-sum-exp, and a soft
cap is a formula of each score, which the kernel also differentiates.

Over a context axis K and V are all-gathered instead of sent around a ring (arXiv 2407.21783, section 3.3.2): each block of a
ring would need a separate mask. Bytes that a rank sends, with B the bytes of its K and V: B(c-1) in forward, as many in
backward. The gathered K and V, cB, are saved for backward unless the layer is checkpointed.

Called eagerly, torch's operator materializes all scores. So devices that use it by default compile it even then; a CPU, where
only tests use it, runs it eagerly.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from parallel import collectives
from parallel.activation_checkpointing import always_save
from parallel.attention import kernels
from parallel.attention.tiles import AttentionOptions
from parallel.attention.zigzag import positions_by_rank
from parallel.mesh import Axis

BLOCK = 128  # rows and columns of a block of scores

always_save(torch.ops.higher_order.flex_attention)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, axis: Axis | None, chosen: AttentionOptions) -> Tensor:
    """Attention with documents, a window, sinks or a soft cap; arguments as for `attention.attention`."""
    (causal, _, documents, window, sinks, soft_cap), scale = chosen, chosen.score_scale(q)
    positions = all_positions = torch.arange(q.shape[2], device=q.device)
    all_documents = documents
    if axis is not None and axis.size > 1:
        k, v = (collectives.gather(x.movedim(2, 0), axis).movedim(0, 2) for x in (k, v))  # (b, k, s, d)
        all_positions = positions_by_rank(k.shape[2], axis.size, q.device)  # (s)
        positions = collectives.local_shard(all_positions, axis)  # (s/c)
        if documents is not None:
            all_documents = collectives.all_gather(documents.t(), axis).t()  # (b, s)
    if q.is_meta or _is_traced_elsewhere(q, axis):  # the same sizes and products, and no mask to compute
        return torch.ops.trainshed.attention(q, k, v, None, sinks, causal, scale, window, kernels.PLANNED)[0]
    options: dict[str, Any] = {"scale": scale, "enable_gqa": k.shape[1] != q.shape[1]}
    options["block_mask"] = _block_mask(documents, all_documents, positions, all_positions, causal, window)
    if soft_cap is not None:
        options["score_mod"] = _soft_capped(soft_cap)
    if sinks is None:
        return _operator(q)(q, k, v, **options)
    out, extra = _operator(q)(q, k, v, **options, return_aux=AuxRequest(lse=True))
    return (out * torch.sigmoid(extra.lse - sinks[:, None])[..., None]).to(q.dtype)


def _soft_capped(soft_cap: float) -> Callable[..., Tensor]:
    """The formula of a score with this soft cap."""

    def score_mod(score: Tensor, b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return soft_cap * torch.tanh(score / soft_cap)

    return score_mod


def _is_traced_elsewhere(q: Tensor, axis: Axis | None) -> bool:
    """Whether a graph for another device is traced on this one, which may not support FlexAttention."""
    return (
        axis is not None
        and axis.masks_by_flex is True
        and not kernels.get_kernel(kernels.default_kernel(q)).uses_flex
    )


def _operator(q: Tensor) -> Callable[..., Tensor]:
    default = kernels.get_kernel(kernels.default_kernel(q))
    if torch.compiler.is_compiling() or not default.uses_flex:
        return flex_attention
    return _compiled()


@cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=False)


def _block_mask(
    documents: Tensor | None,
    keys: Tensor | None,
    positions: Tensor,
    key_positions: Tensor,
    causal: bool,
    window: int | None,
) -> BlockMask:
    """Block mask of visible keys: same document, no later than the query if causal, within the window.

    Args:
        documents, keys: (b, s/c) and (b, s), document indices of queries and keys.
        positions, key_positions: (s/c) and (s).
    """

    def visible(b: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = positions[query] - key_positions[key]
        seen = distance >= 0 if causal else distance == distance
        if window is not None:
            seen = seen & (distance < window)
        return seen if documents is None or keys is None else seen & (documents[b, query] == keys[b, key])

    # (1, blocks)
    (first, last), (key_first, key_last) = (_ranges(positions[None]), _ranges(key_positions[None]))
    # Between the positions of a block's queries and keys, (1, query blocks, key blocks).
    nearest, farthest = first[:, :, None] - key_last[:, None], last[:, :, None] - key_first[:, None]
    some = every = torch.ones_like(nearest, dtype=torch.bool)
    if causal:
        some, every = farthest >= 0, nearest >= 0
    if window is not None:
        some, every = some & (nearest < window), every & (farthest < window)
    if documents is not None and keys is not None:
        (low, high), (key_low, key_high) = _ranges(documents), _ranges(keys)  # (b, blocks)
        low, high = low[:, :, None], high[:, :, None]
        key_low, key_high = key_low[:, None], key_high[:, None]
        some = some & (low <= key_high) & (key_low <= high)
        every = every & (low == high) & (key_low == key_high) & (low == key_low)
    partial = some & ~every
    # Not `from_kv_blocks`: it inverts the lists of key blocks with two scatters. Order of the fields: of keys for each query
    # block, partly visible and fully, then of queries for each key block.
    of_queries = *_numbered(partial), *_numbered(every)
    of_keys = *_numbered(partial.mT), *_numbered(every.mT)
    lengths = len(positions), len(key_positions)
    return BlockMask(lengths, *of_queries, *of_keys, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=visible)


def _ranges(x: Tensor) -> tuple[Tensor, Tensor]:
    """Lowest and highest value of each block, (b, s) -> (b, ceil(s / BLOCK)) each."""
    # Copies of the last value fill the last block: int64's limits are no doubles, as which `F.pad` would take them.
    last = x[:, -1:].expand(-1, -x.shape[1] % BLOCK)
    blocks = torch.cat((x, last), 1).unflatten(1, (-1, BLOCK))
    return blocks.amin(2), blocks.amax(2)


def _numbered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Count the true key blocks of each row, and put their indices first.

    Shapes: (b, query blocks, key blocks) -> (b, 1, query blocks) and (b, 1, query blocks, key blocks).
    """
    blocks = blocks[:, None]
    indices = torch.argsort(blocks.to(torch.int32), dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), indices.to(torch.int32)
