"""Dropout whose masks are a function of places, so that no generator has a state to keep, to split or to save.

Whether an element is dropped is decided by a hash of what it is: the run's seed, the sample's number in the run, the token's
position in it, the layer, the place in the layer, and the feature or key that it stands for. Whatever the topology, an
element meets the same hash: ranks that hold copies of a region drop the same of it, ranks that hold pieces drop what one
process would have dropped there. A resumed run goes on exactly, and recomputation in backward finds the same masks. Numbers
come in as tensors, so ranks and layers share their compiled graphs.

Keys are 64 bits wide, mixed by splitmix64's finalizer (Steele et al. 2014); an element's hash is 32 bits wide, as integer
arithmetic of a whole mask should be cheap (constants of the finalizer: github.com/skeeto/hash-prospector).
Cost: about ten integer operations an element, one pass where compiled; a byte an element is kept for backward.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from parallel import collectives
from parallel.mesh import Axis


class Keys(NamedTuple):
    """Random keys of a microbatch's tokens, int64.

    Attributes:
        whole: (b, s/c), for what each rank computes on all tokens (attention).
        own: (b·s/c), or (b·s/(c·t)) with sequence parallelism, for hidden states.
    """

    whole: Tensor
    own: Tensor

    def fold(self, number: int) -> Keys:
        """Keys of a place further in: a layer of the model, a place in a layer."""
        return Keys(fold(self.whole, number), fold(self.own, number))


def sample_keys(seed: int, samples: Tensor) -> Tensor:
    """Keys (b) of the samples with these numbers (b), counted from the run's beginning, on the samples' device."""
    return fold(torch.full_like(samples, seed, dtype=torch.int64), samples)


def token_keys(samples: Tensor, positions: Tensor, axis: Axis, sequence_parallel: bool) -> Keys:
    """Keys of the tokens at positions (s/c) or (b, s/c) of the samples with keys (b)."""
    whole = fold(samples[:, None], positions)  # (b, s/c)
    own = whole.flatten()  # (b·s/c)
    return Keys(whole, collectives.own_piece(own, axis) if sequence_parallel else own)


def fold(keys: Tensor, number: int | Tensor) -> Tensor:
    """New keys from keys and whole numbers, which broadcast."""
    if isinstance(number, int):
        number = torch.full((), number, dtype=torch.int64, device=keys.device)
    return _mix64(keys ^ _mix64(number.to(torch.int64)))


def dropout(x: Tensor, keys: Tensor, rate: float) -> Tensor:
    """Zero elements of x (..., n) with probability `rate`, scale the others by 1 / (1 - rate).

    Args:
        keys: (...), one a row of x.
    """
    columns = torch.arange(x.shape[-1], device=x.device)
    return (x * (1 / (1 - rate))).where(dropout_mask(keys, columns, rate), 0)


def dropout_mask(keys: Tensor, columns: Tensor, rate: float) -> Tensor:
    """What dropout keeps, bool (..., n), of rows with keys (...) and columns with the numbers (..., n)."""
    words = keys.to(torch.int32)[..., None] ^ _mix32(columns.to(torch.int32))  # (..., n)
    return (_mix32(words) & 0x7FFFFFFF) >= int(rate * 2**31)


def _mix64(x: Tensor) -> Tensor:
    """A bijection of 64-bit words in which every input bit reaches every output bit; products wrap around."""
    x = x + _signed(0x9E3779B97F4A7C15, 64)
    x = (x ^ _shift(x, 30, 64)) * _signed(0xBF58476D1CE4E5B9, 64)
    x = (x ^ _shift(x, 27, 64)) * _signed(0x94D049BB133111EB, 64)
    return x ^ _shift(x, 31, 64)


def _mix32(x: Tensor) -> Tensor:
    """The same of 32-bit words."""
    x = (x ^ _shift(x, 16, 32)) * _signed(0x7FEB352D, 32)
    x = (x ^ _shift(x, 15, 32)) * _signed(0x846CA68B, 32)
    return x ^ _shift(x, 16, 32)


def _shift(x: Tensor, by: int, bits: int) -> Tensor:
    """Logical shift to the right; torch's own copies the sign."""
    return (x >> by) & ((1 << (bits - by)) - 1)


def _signed(word: int, bits: int) -> int:
    return word - (1 << bits) if word >> (bits - 1) else word
