"""Causal convolution of each channel over the last few tokens of the same document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function


def short_convolution(
    x: Tensor, weight: Tensor, offsets: Tensor | None = None, previous: Tensor | None = None
) -> Tensor:
    """Convolve each channel with its taps, of which the last is multiplied by the token itself.

    Args:
        x: (b, s, channels).
        weight: (channels, width).
        offsets: (b or 1, s), number of tokens of its document before each token; earlier tokens are not read. None: all are.
        previous: (b, width - 1, channels), the tokens before the first; None: zeros.
    """
    before = weight.shape[1] - 1
    padded = F.pad(x, (0, 0, before, 0)) if previous is None else torch.cat((previous, x), 1)
    return _Convolution.apply(padded, weight, offsets)


class _Convolution(Function):
    """Autograd would fill a tensor of zeros for the gradient of each tap."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, weight: Tensor, offsets: Tensor | None) -> Tensor:
        ctx.save_for_backward(padded, weight, offsets)
        total = padded[:, weight.shape[1] - 1 :] * weight[:, -1]
        for tap, read, seen in _taps(padded, weight.shape[1], offsets):
            total = total.addcmul_(read if seen is None else read * seen, weight[:, tap])
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        padded, weight, offsets = ctx.saved_tensors
        before, wide = weight.shape[1] - 1, torch.promote_types(weight.dtype, torch.float32)
        of_padded = F.pad(grad * weight[:, -1], (0, 0, before, 0))
        of_taps = [(grad * padded[:, before:]).sum((0, 1), dtype=wide)]
        for tap, read, seen in _taps(padded, weight.shape[1], offsets):
            counted = grad if seen is None else grad * seen
            of_padded[:, tap : tap + grad.shape[1]].addcmul_(counted, weight[:, tap])
            of_taps.append((counted * read).sum((0, 1), dtype=wide))
        of_weight = torch.stack([*of_taps[1:], of_taps[0]], 1)
        return of_padded, of_weight.to(weight.dtype), None


def _taps(padded: Tensor, width: int, offsets: Tensor | None) -> Iterator[tuple[int, Tensor, Tensor | None]]:
    """The taps of earlier tokens, the farthest first.

    Returns:
        their numbers, what they read (b, s, channels), and which tokens have them (b or 1, s, 1); None: all.
    """
    length = padded.shape[1] - width + 1
    for tap in range(width - 1):
        seen = None if offsets is None else (offsets >= width - 1 - tap)[..., None]
        yield tap, padded[:, tap : tap + length], seen
