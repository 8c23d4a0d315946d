"""Causal convolution of each channel over the last tokens of the same document, and its SiLU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from parallel.backward import needs_gradient


def short_convolution(
    x: Tensor, weight: Tensor, offsets: Tensor | None = None, previous: Tensor | None = None
) -> Tensor:
    """SiLU of each channel convolved with its taps, of which the last is multiplied by the token itself.

    Sums are in float32 or wider, whatever the dtype of x, as in fused kernels.

    Args:
        x: (b, s, channels).
        weight: (channels, width).
        offsets: (b or 1, s), number of tokens of its document before each token; earlier tokens are not read. None: all are.
        previous: (b, width - 1, channels), the tokens before the first; None: zeros.
    """
    return _Convolution.apply(x, weight, previous, offsets)


class _Convolution(Function):
    """Saves its inputs only and convolves again in backward; autograd would save what each tap reads."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, previous: Tensor | None, offsets: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight, previous, offsets)
        return F.silu(_convolve(*_widened(x, weight, previous), offsets)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight, previous, offsets = ctx.saved_tensors
        padded, taps = _widened(x, weight, previous)
        before, of_x, of_weight, of_previous = len(taps) - 1, None, None, None
        grad = torch.ops.aten.silu_backward(grad.to(padded.dtype), _convolve(padded, taps, offsets))
        if needs_gradient(ctx, 1):
            sums = [
                (_seen(grad, seen) * read).sum((0, 1)) for _, read, seen in _earlier(padded, before, offsets)
            ]
            of_weight = torch.stack([*sums, (grad * padded[:, before:]).sum((0, 1))], 1).to(weight.dtype)
        if needs_gradient(ctx, 0):
            of_padded = F.pad(grad * taps[before], (0, 0, before, 0))
            for tap, _, seen in _earlier(padded, before, offsets):
                of_padded[:, tap : tap + grad.shape[1]].addcmul_(_seen(grad, seen), taps[tap])
            of_x = of_padded[:, before:].to(x.dtype)
            of_previous = None if previous is None else of_padded[:, :before].to(x.dtype)
        return of_x, of_weight, of_previous, None


def _widened(x: Tensor, weight: Tensor, previous: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The tokens (b, width - 1 + s, channels) that are read, and the taps, the farthest token's first."""
    wide, before = torch.promote_types(x.dtype, torch.float32), weight.shape[1] - 1
    # Compilers save the padded tokens, so they are widened last.
    padded = F.pad(x, (0, 0, before, 0)) if previous is None else torch.cat((previous, x), 1)
    return padded.to(wide), weight.to(wide).unbind(1)


def _convolve(padded: Tensor, taps: tuple[Tensor, ...], offsets: Tensor | None) -> Tensor:
    before = len(taps) - 1
    total = padded[:, before:] * taps[before]
    for tap, read, seen in _earlier(padded, before, offsets):
        total = total.addcmul_(_seen(read, seen), taps[tap])
    return total


def _earlier(
    padded: Tensor, before: int, offsets: Tensor | None
) -> Iterator[tuple[int, Tensor, Tensor | None]]:
    """The taps of earlier tokens, the farthest first.

    Returns:
        their numbers, what they read (b, s, channels), and which tokens have them (b or 1, s, 1); None: all.
    """
    length = padded.shape[1] - before
    for tap in range(before):
        seen = None if offsets is None else (offsets >= before - tap)[..., None]
        yield tap, padded[:, tap : tap + length], seen


def _seen(x: Tensor, seen: Tensor | None) -> Tensor:
    return x if seen is None else x * seen
