"""Initialization by (seed, global name): every topology starts from the same numbers.

A global tensor is drawn in blocks of rows, each from a generator of its own keyed by sha256(seed, name, block), on the
CPU in float32. A rank draws only the blocks its piece touches, so memory stays at one block (at most 4 M elements)
and no rank needs the whole tensor. The piece is then rounded to the parameter's type.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from parallel.layout import Box, layout_of
from parallel.mesh import Axis

BLOCK = 1 << 22  # elements


class Initializer(Protocol):
    """What a global tensor starts as."""

    def fill(self, local: Tensor, box: Box, seed: int) -> None:
        """Write the piece `box` of the global tensor into the view `local` of that piece."""


@dataclass(frozen=True)
class Constant:
    """The same value everywhere."""

    value: float

    def fill(self, local: Tensor, box: Box, seed: int) -> None:
        local.fill_(self.value)


class Zeros(Constant):
    def __init__(self) -> None:
        super().__init__(0.0)


class Ones(Constant):
    def __init__(self) -> None:
        super().__init__(1.0)


@dataclass(frozen=True)
class Normal:
    """Independent draws of N(0, std²)."""

    std: float

    def fill(self, local: Tensor, box: Box, seed: int) -> None:
        row_size = math.prod(box.shape[1:])
        rows = max(1, BLOCK // max(1, row_size))
        first, last = box.offsets[0], box.offsets[0] + box.sizes[0]
        inner = box.index()[1:]
        for block in range(first // rows, math.ceil(last / rows)):
            start = block * rows
            stop = min(start + rows, box.shape[0])
            drawn = torch.randn(stop - start, *box.shape[1:], generator=generator(seed, box.name, block))
            low, high = max(start, first), min(stop, last)
            local[low - first : high - first].copy_(
                drawn[(slice(low - start, high - start), *inner)].mul_(self.std)
            )


def generator(seed: int, *key: object) -> torch.Generator:
    """A CPU generator keyed by the seed and any printable key."""
    text = "\0".join(str(part) for part in (seed, *key))
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") & (2**63 - 1)
    return torch.Generator().manual_seed(number)


@torch.no_grad()
def initialize(model: nn.Module, axis: Axis, seed: int) -> None:
    """Fill every parameter of the model with this tensor rank's pieces; padding becomes zero.

    Args:
        model: its parameters carry layouts; their names are the global ones.
        axis: the tensor axis.
        seed: of the run.
    """
    for name, parameter in model.named_parameters():
        layout = layout_of(parameter)
        parameter.zero_()
        for box in layout.boxes(name, axis.rank):
            layout.initializer.fill(box.of(parameter), box, seed)
