"""Causal attention with dropout of probabilities, in plain operators: (softmax(q kᵀ / √d) ∘ mask) v.

Attention kernels do not support masks that depend on global indices (random.py), so the s/c × s probabilities are materialized,
in float32 and again after dropout; activation checkpointing frees them after forward. Over a context axis K and V are
all-gathered: 2·k·d·s(c-1)/c elements per layer in forward, as many in backward.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from parallel import collectives
from parallel.mesh import Axis
from parallel.random import dropout_mask, fold


def dropout_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    axis: Axis,
    *,
    positions: Tensor,
    keys: Tensor,
    heads: Tensor,
    rate: float,
    documents: Tensor | None = None,
) -> Tensor:
    """Causal attention of this rank's tokens to the full sequence, with dropout.

    Args:
        q: (b, n/t, s/c, d).
        k, v: (b, k/t, s/c, d).
        axis: context axis.
        positions: (s/c) or (b, s/c), of this rank's tokens.
        keys: (b, s/c), `Keys.attention` of this rank's tokens.
        heads: (n/t), global indices of this rank's query heads.
        rate: dropout probability.
        documents: (b, s/c) integers, each token's document index; tokens attend only within their document.

    Returns:
        (b, n/t, s/c, d)
    """
    b, kv_heads, _, d = k.shape
    k, v = (collectives.gather(x.movedim(2, 0), axis).movedim(0, 2) for x in (k, v))  # (b, k/t, s, d)
    positions = positions.expand(b, -1)  # (b, s/c)
    all_positions = _gather(positions, axis)  # (b, s)
    allowed = all_positions[:, None, :] <= positions[:, :, None]  # (b, s/c, s)
    if documents is not None:
        allowed = allowed & (_gather(documents, axis)[:, None, :] == documents[:, :, None])
    grouped = q.unflatten(1, (kv_heads, -1))  # (b, k/t, n/k, s/c, d)
    scores = (grouped @ k[:, :, None].mT).flatten(1, 2).float() / math.sqrt(d)  # (b, n/t, s/c, s)
    probability = scores.masked_fill(~allowed[:, None], -torch.inf).softmax(-1)
    rows = fold(keys[:, None, :], heads[:, None])  # (b, n/t, s/c)
    mask = dropout_mask(rows, all_positions[:, None, None, :], rate)  # (b, n/t, s/c, s)
    dropped = (probability / (1 - rate)).where(mask, 0).to(v.dtype).unflatten(1, (kv_heads, -1))
    return (dropped @ v[:, :, None]).flatten(1, 2)


def _gather(x: Tensor, axis: Axis) -> Tensor:
    """(b, s/c) of each rank -> (b, s)."""
    return collectives.all_gather(x.t(), axis).t()
