"""The common form of LoRA adapters, whatever their format, and their merge into weights."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from modeling.conversion.weights import (
    NOT_IN_WEIGHTS,
    Part,
    Weights,
    differences,
    global_shapes,
    structural_differences,
)
from profiles.sections.model import Model

log = logging.getLogger(__name__)


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
        dtype: dtype in which their run trains; None if unknown.
    """

    model: Model
    rank: int
    dropout: float = 0.0
    base: str | None = None
    dtype: torch.dtype | None = None

    @abstractmethod
    def __iter__(self) -> Iterator[Factors]:
        """The update of each tensor. Raises ValueError if a factor is missing or corrupted."""

    def merged(self, weights: Weights, model: Model | None = None, training_dtype: bool = True) -> Weights:
        """The weights with the updates added.

        Args:
            model: description of the result; None: the adapters', with which they were trained.
            training_dtype: read the result in `dtype`; otherwise each tensor in the dtype in which it is read from `weights`.

        Raises:
            ValueError: the adapters and the weights belong to different models.
        """
        here = "in the adapters' model"
        models = self.model, weights.model, here, "in that of the weights"
        if rejected := structural_differences(*models, global_shapes(self.model), weights.shapes):
            raise ValueError(f"the adapters belong to another model than the weights: {rejected}")
        if model is not None:
            for difference in differences(NOT_IN_WEIGHTS, self.model, model, here, "in the config"):
                log.warning("%s, which is written", difference)
        parts = dict(weights.parts)
        for factors in self:
            shape = (len(factors.b), factors.a.shape[1])
            if weights.shapes.get(factors.tensor) != shape:
                raise ValueError(
                    f"the adapters update {factors.tensor} of shape {shape}, which the weights do not have"
                )
            # The sum is float32, and rounded once, when `Weights` reads it.
            parts[factors.tensor] = [
                Part(part.offsets, part.sizes, part.dtype, partial(_add, part, factors))
                for part in parts[factors.tensor]
            ]
        dtype = self.dtype if training_dtype and self.dtype else weights.dtype
        return Weights(model or self.model, parts, dtype)


def _add(part: Part, factors: Factors, index: tuple[slice, ...]) -> Tensor:
    offsets = tuple(offset + at.start for offset, at in zip(part.offsets, index, strict=True))
    return part.read(index).float() + factors.of(offsets, tuple(at.stop - at.start for at in index))
