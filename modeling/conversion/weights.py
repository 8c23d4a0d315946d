"""A whole model's weights as global tensors in parts, wherever they lie: what conversion reads.

A part is a box of a global tensor and how to map it into memory, so every source is the same to a reader: a Hugging Face file
has one part a tensor, NxD's shards one a rank, a Trainshed checkpoint one an item. Names, shapes and boxes are those
that the model's own layers declare. Reading a slice costs the slice; nothing else is held.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from modeling.models.build import MODELS
from parallel import Mesh
from parallel.layout import layout_of
from profiles.model import Model

TYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Part:
    """A box of a global tensor, and how to map it into memory.

    Attributes:
        offsets, sizes: the box, in global coordinates.
        dtype: as it is stored.
        open: gives the box as a tensor of shape `sizes`, of any strides, not to be written to.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    open: Callable[[], Tensor]


class Weights:
    """The parts of every global tensor of a model, each element once.

    Args:
        model: the architecture's numbers.
        parts: by the names that our layers have.
        dtype: to read as; None reads each tensor as it is stored.

    Raises:
        ValueError: a tensor that is missing, incomplete, there twice, unknown or of a type that is no weight's; names it.
    """

    def __init__(
        self, model: Model, parts: Mapping[str, list[Part]], dtype: torch.dtype | None = None
    ) -> None:
        self.model, self.parts, self.dtype = model, dict(parts), dtype
        self.shapes = shapes(model)
        unknown = sorted(self.parts.keys() - self.shapes.keys())
        if unknown:
            raise ValueError(f"there are tensors that the model does not have: {some(unknown)}")
        missing = [name for name in self.shapes if not self.parts.get(name)]
        if missing:
            raise ValueError(f"tensors of the model are missing: {some(missing)}")
        for name, shape in self.shapes.items():
            _check(name, shape, self.parts[name])

    def dtype_of(self, name: str) -> torch.dtype:
        """The type that `read` gives a tensor in."""
        return self.dtype or self.parts[name][0].dtype

    def nbytes(self) -> int:
        """Of all tensors, as they are read."""
        return sum(math.prod(shape) * self.dtype_of(name).itemsize for name, shape in self.shapes.items())

    def read(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        """A box of a global tensor, of shape `sizes`; not to be written to, it may be the file itself."""
        found = []
        for part in self.parts[name]:
            low = [max(a, b) for a, b in zip(offsets, part.offsets, strict=True)]
            high = [
                min(a + n, b + m) for a, n, b, m in zip(offsets, sizes, part.offsets, part.sizes, strict=True)
            ]
            if all(a < b for a, b in zip(low, high, strict=True)):
                found.append((part, low, high))
        if len(found) == 1:
            return _cut(*found[0]).to(self.dtype_of(name))
        whole = torch.empty(sizes, dtype=self.dtype_of(name))
        for part, low, high in found:
            target = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offsets, strict=True))
            whole[target] = _cut(part, low, high)
        return whole

    def blocks(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Iterator[Tensor]:
        """The same box as tensors whose rows follow each other, cut where parts begin: a block of one part is not copied."""
        low, high = offsets[0], offsets[0] + sizes[0]
        edges = {
            edge for part in self.parts[name] for edge in (part.offsets[0], part.offsets[0] + part.sizes[0])
        }
        cuts = sorted({low, high, *(edge for edge in edges if low < edge < high)})
        for start, stop in pairwise(cuts):
            yield self.read(name, (start, *offsets[1:]), (stop - start, *sizes[1:]))


def _cut(part: Part, low: list[int], high: list[int]) -> Tensor:
    return part.open()[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, part.offsets, strict=True))]


def _check(name: str, shape: tuple[int, ...], parts: list[Part]) -> None:
    for part in parts:
        if len(part.sizes) != len(shape) or any(
            o + s > n for o, s, n in zip(part.offsets, part.sizes, shape, strict=True)
        ):
            raise ValueError(f"{name} is of shape {part.sizes}, the model's is {shape}")
        if part.dtype not in TYPES or part.dtype != parts[0].dtype:
            kinds = sorted({str(each.dtype).removeprefix("torch.") for each in parts})
            raise ValueError(
                f"{name} is of type {' and '.join(kinds)}, a weight is float32, bfloat16 or float16"
            )
    if len({part.offsets for part in parts}) != len(parts):
        raise ValueError(f"{name} is there twice")
    held, wanted = sum(math.prod(part.sizes) for part in parts), math.prod(shape)
    if held != wanted:
        raise ValueError(f"{name} has {held:,} elements of {wanted:,}: shape {shape}")


@lru_cache(maxsize=4)
def shapes(model: Model) -> Mapping[str, tuple[int, ...]]:
    """Name and shape of every global tensor of a model, in the order of its layers."""
    built = MODELS[model.architecture](model, Mesh(rank=0), device=torch.device("meta"))
    return {
        box.name: box.shape
        for name, parameter in built.named_parameters()
        for box in layout_of(parameter).boxes(name, 0)
    }


def slices(
    offsets: tuple[int, ...], sizes: tuple[int, ...], itemsize: int, limit: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """A box cut along its first dim into boxes of at most `limit` bytes, but of a row at least."""
    rows = max(1, limit // (math.prod(sizes[1:]) * itemsize))
    for start in range(0, sizes[0], rows):
        yield (offsets[0] + start, *offsets[1:]), (min(rows, sizes[0] - start), *sizes[1:])


def some(names: list[str]) -> str:
    """The first few names, and how many there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
