"""Attention within documents as FlexAttention (torch.nn.attention.flex_attention), which torch.compile turns into one kernel.

For devices whose flash attention takes no mask. The mask is a formula of positions and document indices, so no s × s tensor
exists: the kernel visits only the blocks of 128 × 128 scores that the documents of their rows and columns can share, and
applies the formula in those that are not wholly visible. KV heads are not repeated. All shapes are static and nothing is read
on the host, whatever the number of documents.

Over a context axis K and V are all-gathered instead of sent around a ring (arXiv 2407.21783, section 3.3.2): each block of a
ring would need a mask of its own. Bytes that a rank sends, with B the bytes of its K and V: B(c-1) in forward, as many in
backward. The gathered K and V, cB, are saved for backward unless the layer is checkpointed.

Called eager, the operator materializes all scores. On devices that use it by default, it is compiled then; on a CPU, where only
tests ask for it, the formula is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from parallel import collectives
from parallel.activation_checkpointing import save_outputs
from parallel.attention import kernels
from parallel.mesh import Axis

BLOCK = 128  # rows and columns of a block of scores

save_outputs(torch.ops.higher_order.flex_attention)


def document_attention(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor, axis: Axis | None, *, causal: bool, scale: float
) -> Tensor:
    """Attention within documents; arguments and result as for `attention.attention`."""
    positions = all_positions = torch.arange(q.shape[2], device=q.device)
    all_documents = documents
    if axis is not None and axis.size > 1:
        k, v = (collectives.gather(x.movedim(2, 0), axis).movedim(0, 2) for x in (k, v))  # (b, k, s, d)
        all_documents = collectives.all_gather(documents.t(), axis).t()  # (b, s)
        all_positions = _positions_by_rank(k.shape[2], axis.size, q.device)  # (s)
        positions = collectives.local_shard(all_positions, axis)  # (s/c)
    mask = _block_mask(documents, all_documents, positions, all_positions, causal)
    grouped = k.shape[1] != q.shape[1]
    return _operator(q)(q, k, v, block_mask=mask, scale=scale, enable_gqa=grouped)


def _operator(q: Tensor) -> Callable[..., Tensor]:
    default = kernels.find_kernel(kernels.default_kernel(q))
    if torch.compiler.is_compiling() or not getattr(default, "uses_flex", False):
        return flex_attention
    return _compiled()


@cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=False)


def _positions_by_rank(sequence: int, size: int, device: torch.device) -> Tensor:
    """Positions (s) of the tokens of all ranks in rank order: rank r holds chunks r and 2c-1-r (ring.py)."""
    chunks = torch.arange(sequence, device=device).view(2 * size, -1)
    return torch.stack((chunks[:size], chunks.flip(0)[:size]), 1).flatten()


def _block_mask(
    documents: Tensor, keys: Tensor, positions: Tensor, key_positions: Tensor, causal: bool
) -> BlockMask:
    """Which keys each query sees: those of its document, up to its own position if causal.

    Args:
        documents, keys: (b, s/c) and (b, s), document indices of queries and keys.
        positions, key_positions: (s/c) and (s).
    """

    def visible(b: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = documents[b, query] == keys[b, key]
        return same & (key_positions[key] <= positions[query]) if causal else same

    (low, high), (key_low, key_high) = _ranges(documents), _ranges(keys)  # (b, blocks)
    low, high = low[:, :, None], high[:, :, None]
    key_low, key_high = key_low[:, None], key_high[:, None]
    some = (low <= key_high) & (key_low <= high)  # (b, query blocks, key blocks)
    every = (low == high) & (key_low == key_high) & (low == key_low)
    if causal:
        (first, last), (key_first, key_last) = _ranges(positions[None]), _ranges(key_positions[None])
        some = some & (key_first[:, None] <= last[:, :, None])
        every = every & (key_last[:, None] <= first[:, :, None])
    return BlockMask.from_kv_blocks(
        *_numbered(some & ~every),
        *_numbered(every),
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
        seq_lengths=(documents.shape[1], keys.shape[1]),
    )


def _ranges(x: Tensor) -> tuple[Tensor, Tensor]:
    """Lowest and highest value of each block, (b, s) -> (b, ceil(s / BLOCK)) each."""
    limits, missing = torch.iinfo(x.dtype), (0, -x.shape[1] % BLOCK)
    low, high = (
        F.pad(x, missing, value=value).unflatten(1, (-1, BLOCK)) for value in (limits.max, limits.min)
    )
    return low.amin(2), high.amax(2)


def _numbered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Number of true key blocks of each row (b, 1, query blocks), and their indices first in (b, 1, query blocks, key blocks)."""
    blocks = blocks[:, None]
    indices = torch.argsort(blocks.to(torch.int32), dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), indices.to(torch.int32)
