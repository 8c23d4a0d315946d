"""Stateless dropout: masks hash global indices, so there is no RNG state to save, split or preserve.

Whether an element is dropped depends on a hash of the run's seed, the sample's index in the run, the token's position, the
layer, the site in the layer, and the feature or key index. The hash is the same under any topology: ranks that hold copies of
a region drop the same elements, and ranks that hold shards drop what a single process would drop there. Resumed runs and
recomputation in backward get the same masks. Indices are passed as tensors, so ranks and layers share compiled graphs.

Keys and hashes are 32 bits wide: accelerators compute wider integers slowly or, Trainium, not exactly. Two rows share a mask
with a probability of 2^-32 (constants of the mix: github.com/skeeto/hash-prospector).
Cost: about ten integer operations per element, one pass if compiled; saves a byte per element for backward.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from parallel import collectives
from parallel.mesh import Axis


class Keys(NamedTuple):
    """Dropout keys of a microbatch's tokens, int32."""

    attention: Tensor  # (b, s/c), for attention probabilities
    hidden: Tensor  # (b·s/c), or (b·s/(c·t)) with sequence parallelism, for hidden states

    def fold(self, index: int) -> Keys:
        """Derive the keys of a site in a layer."""
        return Keys(fold(self.attention, index), fold(self.hidden, index))


def sample_keys(seed: int, samples: Tensor) -> Tensor:
    """Keys (b) of samples (b), given by their indices in the run modulo 2^32, on the samples' device."""
    return fold(torch.full_like(samples, _signed(seed), dtype=torch.int32), samples)


def token_keys(samples: Tensor, positions: Tensor, layers: Tensor) -> tuple[Tensor, Tensor]:
    """Token keys (b, s/c) at positions (s/c) or (b, s/c), and their keys (l, b, s/c) in the layers (l).

    Args:
        samples: the samples' keys (b).
        layers: the layers' numbers in the model.
    """
    tokens = fold(samples[:, None], positions)  # (b, s/c)
    return tokens, fold(tokens, layers[:, None, None])


def local_keys(tokens: Tensor, axis: Axis, sequence_parallel: bool) -> Keys:
    """Keys of a microbatch from those of its tokens (b, s/c), as views of them."""
    flat = tokens.flatten()  # (b·s/c)
    return Keys(tokens, collectives.local_shard(flat, axis) if sequence_parallel else flat)


def fold(keys: Tensor, index: int | Tensor) -> Tensor:
    """Derive new keys from keys and integer indices, which broadcast."""
    if isinstance(index, int):
        index = torch.full((), index, dtype=torch.int32, device=keys.device)
    return _mix((keys ^ _mix(index.to(torch.int32))) + _signed(0x9E3779B9))  # the mix alone maps 0 to 0


def dropout(x: Tensor, keys: Tensor, rate: float, columns: Tensor | None = None) -> Tensor:
    """Zero elements of x (..., n) with probability `rate`, scale the others by 1 / (1 - rate).

    Args:
        keys: (...), one for each row of x.
        columns: (n), global indices of x's columns; None: 0 to n - 1.
    """
    if columns is None:
        columns = torch.arange(x.shape[-1], device=x.device)
    return (x * (1 / (1 - rate))).where(dropout_mask(keys, columns, rate), 0)


def dropout_mask(keys: Tensor, columns: Tensor, rate: float) -> Tensor:
    """Mask (..., n), True for elements to keep, of rows with keys (...) and columns with indices (..., n)."""
    words = keys[..., None] ^ _mix(columns.to(torch.int32))  # (..., n)
    return (_mix(words) & 0x7FFFFFFF) >= int(rate * 2**31)


def _mix(x: Tensor) -> Tensor:
    """Bijective mix of 32-bit words: every input bit affects every output bit; products wrap around."""
    x = (x ^ _shift(x, 16)) * _signed(0x7FEB352D)
    x = (x ^ _shift(x, 15)) * _signed(0x846CA68B)
    return x ^ _shift(x, 16)


def _shift(x: Tensor, by: int) -> Tensor:
    """Logical right shift; torch's own is arithmetic."""
    return (x >> by) & ((1 << (32 - by)) - 1)


def _signed(word: int) -> int:
    """The int32 with these low 32 bits."""
    return (word + (1 << 31)) % (1 << 32) - (1 << 31)
