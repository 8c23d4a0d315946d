"""Two checkpoints of any kinds compared tensor by tensor, to the bit, a slice at a time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from modeling.conversion.weights import Weights, slices

WORKERS = 4


def differences(one: Weights, other: Weights, limit: int) -> list[str]:
    """What differs, a sentence a tensor; where types differ, both are compared as the narrower one.

    Args:
        limit: bytes of a slice.

    Raises:
        ValueError: they are of different models.
    """
    for name in (*one.shapes, *other.shapes):
        a, b = one.shapes.get(name), other.shapes.get(name)
        if a != b:
            raise ValueError(
                f"different models: {name} is {a or 'missing'} in one and {b or 'missing'} in the other"
            )

    def compare(name: str) -> str | None:
        shape = one.shapes[name]
        types = {one.dtype_of(name), other.dtype_of(name)}
        if types == {torch.bfloat16, torch.float16}:
            return f"{name} is bfloat16 in one and float16 in the other"
        dtype = min(types, key=lambda each: each.itemsize)
        for offsets, sizes in slices((0,) * len(shape), shape, 4, limit):
            a, b = (_bits(each.read(name, offsets, sizes).to(dtype)) for each in (one, other))
            if not torch.equal(a, b):
                place = (a != b).nonzero()[0].tolist()
                first = tuple(at + offset for at, offset in zip(place, offsets, strict=True))
                return f"{name} differs, first at {first}"
        return None

    with ThreadPoolExecutor(WORKERS) as pool:
        return [found for found in pool.map(compare, one.shapes) if found]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)
