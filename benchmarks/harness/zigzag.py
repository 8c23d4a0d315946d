"""Split a sequence into the zigzag shards of a context axis, and merge them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from parallel.attention.zigzag import zigzag_positions


def zigzag_split(x: Tensor, size: int, rank: int, dim: int) -> Tensor:
    """The shard of x that a rank of the context axis holds: (..., s, ...) -> (..., s/c, ...)."""
    return x.index_select(dim, zigzag_positions(x.shape[dim], size, rank).to(x.device))


def zigzag_merge(shards: Sequence[Tensor], dim: int) -> Tensor:
    """Inverse of `zigzag_split`, from all ranks' shards in rank order."""
    x = torch.cat([*shards], dim)
    positions = [zigzag_positions(x.shape[dim], len(shards), rank) for rank in range(len(shards))]
    return x.index_select(dim, torch.cat(positions).argsort().to(x.device))
