"""The common form of LoRA adapters, whatever their format, and their merge into weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from modeling.conversion.weights import Part, Weights
from profiles.sections.model import Model


@dataclass(frozen=True)
class Factors:
    """The update of one global tensor, scale · B A."""

    tensor: str  # our name of the tensor
    a: Tensor  # (r, i), float32
    b: Tensor  # (o, r), float32
    scale: float

    def of(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        """A box of the update."""
        rows, columns = (slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
        return self.b[rows] @ self.a[:, columns] * self.scale


class Adapters(ABC):
    """The updates of a model's weights.

    Attributes:
        model: the model that they update.
        rank, dropout: rank and dropout rate of all updates.
        base: source of the weights that they update; None if unknown.
        dtype: dtype of merged weights; None: that in which the weights are read.
    """

    model: Model
    rank: int
    dropout: float = 0.0
    base: str | None = None
    dtype: torch.dtype | None = None

    @abstractmethod
    def __iter__(self) -> Iterator[Factors]:
        """The update of each tensor. Raises ValueError if a factor is missing or corrupted."""

    def merged(self, weights: Weights) -> Weights:
        """The weights with the updates added. Raises ValueError if they belong to another model."""
        parts = dict(weights.parts)
        for factors in self:
            shape = (len(factors.b), factors.a.shape[1])
            if weights.shapes.get(factors.tensor) != shape:
                raise ValueError(
                    f"the adapters update {factors.tensor} of shape {shape}, which the weights do not have"
                )
            parts[factors.tensor] = [
                Part(part.offsets, part.sizes, torch.float32, partial(_add, part, factors))
                for part in parts[factors.tensor]
            ]
        dtype = self.dtype or weights.dtype or next(iter(weights.parts.values()))[0].dtype
        return Weights(weights.model, parts, dtype)


def _add(part: Part, factors: Factors, index: tuple[slice, ...]) -> Tensor:
    offsets = tuple(offset + at.start for offset, at in zip(part.offsets, index, strict=True))
    return part.read(index).float() + factors.of(offsets, tuple(at.stop - at.start for at in index))
