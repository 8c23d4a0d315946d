"""The optimizer's computations on flat tensors, as functions that need no host synchronization.

Devices that compile each operator at its first use run them as compiled programs, one graph for each combination of shapes, the
same on every rank; others run torch's kernels one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from parallel.optimizer.adamw import Update, update

F = TypeVar("F", bound=Callable[..., Any])
Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Returns a compiled version of a function."""


class Programs:
    """Functions that are compiled if the device needs it.

    Args:
        compile: compiles a function; None for devices with a kernel for each operator.
    """

    def __init__(self, compile: Compile | None = None) -> None:
        self.compiled, self._compile = compile is not None, compile

    def prepare(self, function: F) -> F:
        """A function, compiled if the device needs it."""
        prepared: Any = self._compile(function) if self._compile else function  # with the same arguments
        return prepared


class Arithmetic(Programs):
    """The functions of this module, and those of rules.

    Attributes:
        update: compiled `adamw.update`; None for a kernel, if there is one for the device.
    """

    def __init__(self, compile: Compile | None = None) -> None:
        super().__init__(compile)
        prepare = self.prepare
        self.assign, self.add, self.clear = prepare(assign), prepare(add), prepare(clear)
        self.square_norm, self.root, self.clip = prepare(square_norm), prepare(root), prepare(clip)
        self.sign_step = prepare(sign_step)
        self.checksums, self.count_differing = prepare(checksums), prepare(count_differing)
        self.update: Update | None = compile(update) if compile else None


def assign(target: Tensor, source: Tensor) -> None:
    """Overwrite the target with the source, in the target's dtype."""
    if not _run_on_gpu(target, source, add=False):
        target.copy_(source)


def add(target: Tensor, source: Tensor) -> None:
    """Add the source to the target, in the target's dtype."""
    if not _run_on_gpu(target, source, add=True):
        target.add_(source)


def _run_on_gpu(target: Tensor, source: Tensor, *, add: bool) -> bool:
    """Assign or add by our kernel for GPUs, if it is faster than torch's. Returns whether it did."""
    if not target.is_cuda or type(target) is not Tensor:  # a fake tensor, in a trace
        return False
    from parallel.optimizer import gpu_kernels

    suits = gpu_kernels.suits(target, source)
    if suits:
        gpu_kernels.accumulate(target, source, add=add)
    return suits


def clear(target: Tensor) -> None:
    """Set the target to zero."""
    target.zero_()


def square_norm(shards: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """Weighted sum of squares of flat tensors, each with one weight per equal block; 0-dim float32."""
    total = torch.zeros_like(weights[0][0])
    for shard, weight in zip(shards, weights, strict=True):
        norms = torch.linalg.vector_norm(shard.view(len(weight), -1), dim=1, dtype=torch.float32)
        total = total + (norms.square() * weight).sum()
    return total


def root(square: Tensor) -> Tensor:
    """The norm of a squared norm."""
    return square.sqrt()


def clip(
    square: Tensor, skip: Tensor | None, steps: Tensor, limit: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Decide what an update does, and count it in `steps`.

    Args:
        square: global squared norm of the gradients; 0-dim, as are all tensors here.
        skip: nonzero skips the update, as does a norm that is not finite.
        steps: updates so far; incremented in place.
        limit: maximum norm; None disables clipping.

    Returns:
        the norm, 1 if the update is skipped, else 0, and the divisor of the gradients; float32.
    """
    norm = square.sqrt()
    skipped = norm.isfinite().logical_not()
    skipped = (skipped if skip is None else skipped | skip.bool()).float()
    steps.add_(1 - skipped)
    divisor = torch.ones_like(norm) if limit is None else ((norm + 1e-6) / limit).clamp(min=1)
    return norm, skipped, divisor


def sign_step(weights: Tensor, gradient: Tensor, skip: Tensor, size: float) -> None:
    """Move weights by `size` against their gradient's sign, unless `skip` is 1."""
    weights.sub_(gradient.float().sign() * (1 - skip), alpha=size)


def checksums(shards: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """Weighted sum of the bits of flat float32 tensors, each with one weight for each of its equal blocks.

    Of the bits, so that no difference is rounded away; sums wrap around.

    Returns:
        the halves of the sums (`halves`), followed by their negatives, whose maximum is the negative of the minimum.
    """
    blocks = (shard.view(torch.int32).view(len(w), -1) for shard, w in zip(shards, weights, strict=True))
    sums = [block.sum(1, dtype=torch.int32) for block in blocks]
    totals = torch.stack([(s * w).sum(dtype=torch.int32) for s, w in zip(sums, weights, strict=True)])
    parts = halves(totals)
    return torch.cat((parts, -parts))


def count_differing(highest: Sequence[Tensor]) -> Tensor:
    """Number (1) of sums that differ between ranks, given the maxima of `checksums` over ranks; float32."""
    total = torch.zeros_like(highest[0][:1])
    for extremes in highest:
        total = total + differ(extremes).sum(dtype=torch.float32)
    return total


def differ(highest: Tensor) -> Tensor:
    """Whether each of n sums differs between ranks, given the maxima of halves and negatives (4n)."""
    largest, negative = highest.chunk(2)
    upper, lower = (largest + negative).chunk(2)  # largest - smallest
    return upper + lower != 0


def halves(bits: Tensor) -> Tensor:
    """The upper 16 bits of n int32 numbers, followed by the lower ones, as float32 (2n).

    Collectives of Neuron reduce in float32, which holds no more than 24 bits of an integer.
    """
    return torch.cat((bits >> 16, bits & 0xFFFF)).to(torch.float32)


def join_halves(parts: Tensor) -> Tensor:
    """The n int32 numbers whose halves these are (2n)."""
    upper, lower = parts.to(torch.int32).chunk(2)
    return (upper << 16) | lower


EAGER = Arithmetic()
