"""Triton kernels of the optimizer for NVIDIA GPUs: AdamW's update, and gradients added in float32.

The same formulas as adamw.py and arithmetic.py, each element read and written once. torch's fused AdamW also writes the gradient
if it is divided, and leaves the conversion of the weights to another kernel; its conversions of gradients reach two thirds of the
bandwidth. Triton compiles each kernel at its first call and keeps it in Triton's cache.

Import only where Triton is installed, as with torch's CUDA builds.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

BLOCK = 2048  # elements that a program computes
SMALL = 1 << 16  # elements below which torch's kernels, which start sooner, are faster


def update(
    weights: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    learning_rate: float,
    divisor: Tensor,
    skip: Tensor,
    constants: Tensor,
    values: Tensor | None = None,
) -> None:
    """`adamw.update` of flat contiguous tensors, float32 except the gradient and `values`.

    Args:
        step, divisor, skip, constants: as for `adamw.update`.
        values: also receives the weights, in its dtype.
    """
    tensors = weights, gradient, exp_avg, exp_avg_sq, values, step, divisor, skip, constants
    n = weights.numel()
    _update[(triton.cdiv(n, BLOCK),)](*tensors, learning_rate, n, WRITES=values is not None, BLOCK=BLOCK)


def suits(target: Tensor, source: Tensor) -> bool:
    """Whether `accumulate` is faster than torch: for large contiguous tensors of different dtypes."""
    converts = target.is_cuda and source.is_cuda and target.dtype != source.dtype
    return converts and target.is_contiguous() and source.is_contiguous() and target.numel() >= SMALL


def accumulate(target: Tensor, source: Tensor, *, add: bool) -> None:
    """Overwrite the target with the source, or add the source to it; tensors that `suits` accepts."""
    n = target.numel()
    _accumulate[(triton.cdiv(n, BLOCK),)](target, source, n, ADDS=add, BLOCK=BLOCK)


@triton.jit
def _update(
    weights: tl.tensor, gradient: tl.tensor, exp_avg: tl.tensor, exp_avg_sq: tl.tensor, values: tl.tensor, step: tl.tensor,
    divisor: tl.tensor, skip: tl.tensor, constants: tl.tensor, rate: tl.tensor, n: tl.tensor,
    WRITES: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    if tl.load(skip) == 0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < n
        g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
        average = tl.load(exp_avg + at, mask=inside, other=0.0)
        average_sq = tl.load(exp_avg_sq + at, mask=inside, other=0.0)
        weight = tl.load(weights + at, mask=inside, other=0.0)
        new1, old2, new2 = tl.load(constants), tl.load(constants + 1), tl.load(constants + 2)
        log1, log2 = tl.load(constants + 3), tl.load(constants + 4)
        epsilon, decay = tl.load(constants + 5), tl.load(constants + 6)
        number = tl.load(step)
        rate1 = rate / -libdevice.expm1(number * log1)
        correction2 = -libdevice.expm1(number * log2)
        g /= tl.load(divisor)
        average += (g - average) * new1
        average_sq = average_sq * old2 + g * g * new2
        root = tl.sqrt_rn(average_sq / correction2) + epsilon
        updated = weight * (1 - rate * decay) - average / root * rate1
        tl.store(weights + at, updated, mask=inside)
        tl.store(exp_avg + at, average, mask=inside)
        tl.store(exp_avg_sq + at, average_sq, mask=inside)
        if WRITES:
            tl.store(values + at, updated.to(values.dtype.element_ty), mask=inside)


@triton.jit
def _accumulate(
    target: tl.tensor, source: tl.tensor, n: tl.tensor, ADDS: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    value = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        value += tl.load(target + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(target + at, value.to(target.dtype.element_ty), mask=inside)
