"""Parameter initialization keyed by (seed, global name): every topology starts from the same weights.

Draws a global tensor in blocks of rows on the CPU in float32, each from its own generator keyed by sha256(seed, name, block). A
rank draws only the blocks that its shard touches: memory stays at one block (at most 4 M elements), and no rank needs the full
tensor. The shard is then rounded to the parameter's dtype.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from parallel.layout import GlobalBox, is_deferred, layout_of
from parallel.mesh import Axis

BLOCK_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class Constant:
    """Initializer: the same value everywhere."""

    value: float
    rate: float = 1.0  # learning-rate multiplier

    @property
    def matrix_rate(self) -> float:
        """Learning-rate multiplier of updates that are orthogonal matrices."""
        return self.rate

    def fill(self, local: Tensor, box: GlobalBox, seed: int) -> None:
        local.fill_(self.value)


class _Drawn(ABC):
    """Initializer: independent draws."""

    @abstractmethod
    def draw(self, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        """Values of a block of rows."""

    def fill(self, local: Tensor, box: GlobalBox, seed: int) -> None:
        row_size = math.prod(box.shape[1:])
        rows = max(1, BLOCK_ELEMENTS // max(1, row_size))
        first, last = box.offsets[0], box.offsets[0] + box.sizes[0]
        inner = box.index()[1:]
        for block in range(first // rows, math.ceil(last / rows)):
            start = block * rows
            stop = min(start + rows, box.shape[0])
            drawn = self.draw((stop - start, *box.shape[1:]), _generator(seed, box.name, block))
            low, high = max(start, first), min(stop, last)
            local[low - first : high - first].copy_(drawn[(slice(low - start, high - start), *inner)])


@dataclass(frozen=True)
class Normal(_Drawn):
    """Initializer: independent draws from N(0, std²)."""

    std: float
    rate: float = 1.0  # learning-rate multiplier
    width: float = 1.0  # by which `rate` was divided, relative to a base model

    @property
    def matrix_rate(self) -> float:
        """Learning-rate multiplier of updates that are orthogonal matrices.

        The spectral norm of AdamW's updates grows with the width, that of orthogonal ones of AdamW's root mean square with its
        square root; it should stay the same (arXiv 2310.17813).
        """
        return self.rate * math.sqrt(self.width)

    def draw(self, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        return torch.randn(*shape, generator=generator).mul_(self.std)


@dataclass(frozen=True)
class Uniform(_Drawn):
    """Initializer: a function of independent draws from [low, high)."""

    low: float
    high: float
    function: Callable[[Tensor], Tensor]
    rate: float = 1.0  # learning-rate multiplier

    @property
    def matrix_rate(self) -> float:
        """Learning-rate multiplier of updates that are orthogonal matrices."""
        return self.rate

    def draw(self, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        return self.function(torch.empty(*shape).uniform_(self.low, self.high, generator=generator))


def _generator(seed: int, *key: object) -> torch.Generator:
    """A CPU generator seeded by a hash of the seed and a key."""
    text = "\0".join(str(part) for part in (seed, *key))
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") & (2**63 - 1)
    return torch.Generator().manual_seed(number)


@torch.no_grad()
def initialize(named_parameters: Iterable[tuple[str, nn.Parameter]], axis: Axis, seed: int) -> None:
    """Initialize this rank's shard of every parameter, and allocate deferred ones; padding becomes zero.

    Args:
        named_parameters: with layouts, under their global names.
        axis: tensor axis.
        seed: the run's.
    """
    for name, parameter in named_parameters:
        if is_deferred(parameter):
            parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        layout = layout_of(parameter)
        parameter.zero_()
        for box in layout.boxes(name, axis.rank):
            layout.initializer.fill(box.view(parameter), box, seed)
