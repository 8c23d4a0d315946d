"""Compare two checkpoints of any formats tensor by tensor, bit for bit, in slices."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from modeling.conversion.weights import Weights, slices

WORKERS = 4


def differences(one: Weights, other: Weights, limit: int) -> list[str]:
    """One message per tensor that differs; tensors of different dtypes are compared in the narrower one.

    Args:
        limit: maximum bytes of a slice.

    Raises:
        ValueError: the checkpoints belong to different models.
    """
    for name in (*one.shapes, *other.shapes):
        a, b = one.shapes.get(name), other.shapes.get(name)
        if a != b:
            raise ValueError(
                f"different models: {name} has shape {a or '(missing)'} in one and {b or '(missing)'} in the other"
            )

    def compare(name: str) -> str | None:
        shape = one.shapes[name]
        dtypes = {one.dtype_of(name), other.dtype_of(name)}
        if dtypes == {torch.bfloat16, torch.float16}:
            return f"{name} is bfloat16 in one and float16 in the other"
        dtype = min(dtypes, key=lambda dtype: dtype.itemsize)
        for offsets, sizes in slices((0,) * len(shape), shape, 4, limit):
            a, b = (_bits(weights.read(name, offsets, sizes).to(dtype)) for weights in (one, other))
            if not torch.equal(a, b):
                index = (a != b).nonzero()[0].tolist()
                first = tuple(i + offset for i, offset in zip(index, offsets, strict=True))
                return f"{name} differs, first at {first}"
        return None

    with ThreadPoolExecutor(WORKERS) as pool:
        return [difference for difference in pool.map(compare, one.shapes) if difference]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)
