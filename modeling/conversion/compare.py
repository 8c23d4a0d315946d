"""Compare two checkpoints of any formats tensor by tensor, bit for bit, in slices."""

from __future__ import annotations

import math
from collections import Counter

import torch
from torch import Tensor

from modeling.conversion.journal import Progress
from modeling.conversion.weights import Weights, slices

WORKERS = 4


def differences(one: Weights, other: Weights, limit: int) -> list[str]:
    """One message per tensor that differs, largest first; the narrower of two dtypes is compared.

    Messages begin with the tensor's name in the files, if it is known.

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
    labels, progress = _labels(one, other), Progress(one.nbytes())

    def compare(name: str) -> tuple[float, str] | None:
        """The largest absolute difference of a tensor, and the message; None if it is equal."""
        shape = one.shapes[name]
        dtypes = {one.dtype_of(name), other.dtype_of(name)}
        if dtypes == {torch.bfloat16, torch.float16}:
            return math.inf, f"{labels[name]}: bfloat16 in one and float16 in the other"
        dtype = min(dtypes, key=lambda dtype: dtype.itemsize)
        count, absolute, relative = 0, 0.0, 0.0
        for offsets, sizes in slices((0,) * len(shape), shape, 4, limit):
            a, b = (weights.read(name, offsets, sizes).to(dtype) for weights in (one, other))
            progress.add(a.numel() * one.dtype_of(name).itemsize)
            if torch.equal(_bits(a), _bits(b)):
                continue
            different = _bits(a) != _bits(b)
            a, b = a[different].float(), b[different].float()
            gaps = (a - b).abs().nan_to_num(math.inf, math.inf)
            ratios = (gaps / torch.fmax(a.abs(), b.abs())).nan_to_num(0, math.inf)  # 0: of 0 and -0
            count += len(gaps)
            absolute, relative = max(absolute, gaps.max().item()), max(relative, ratios.max().item())
        if not count:
            return None
        largest = f"maximum difference {absolute:.3g}, relative {math.inf if math.isinf(absolute) else relative:.3g}"
        return absolute, f"{labels[name]}: {largest}; {count:,} of {math.prod(shape):,} elements differ"

    with progress.workers(WORKERS) as pool:
        found = [*filter(None, pool.map(compare, one.shapes))]
    return [message for _, message in sorted(found, key=lambda each: each[0], reverse=True)]


def _labels(one: Weights, other: Weights) -> dict[str, str]:
    """Names in the files by ours; with ours in parentheses if several of our tensors are stored as one."""
    stored = {
        name: one.parts[name][0].stored_name or other.parts[name][0].stored_name or name
        for name in one.shapes
    }
    counts = Counter(stored.values())
    return {name: key if counts[key] == 1 else f"{key} ({name})" for name, key in stored.items()}


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)
