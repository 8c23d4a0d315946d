"""Rotary position embedding (RoPE, arXiv 2104.09864), in the half-split order of Hugging Face's Llama.

Pair i of a head, (x_i, x_{i + d/2}), is rotated by the angle position · θ_i, with θ_i = base^(-2i/d). Two scalings of
θ extend the context: "linear" divides every θ by a factor (arXiv 2306.15595); "llama3" divides the low frequencies,
keeps the high ones and interpolates between (Llama 3.1).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from profiles.model import Model


def inverse_frequencies(model: Model) -> Tensor:
    """θ (d/2), scaled, in radians per position; float32."""
    d = model.head_dim
    theta = model.rope_theta ** -(torch.arange(0, d, 2, dtype=torch.int64).float() / d)
    scaling = model.rope_scaling
    if scaling is None:
        return theta
    if scaling.rope_type == "linear":
        return theta / scaling.factor
    # llama3: by wavelength, relative to the context length of the original training
    wavelength = 2 * math.pi / theta
    original = scaling.original_max_position_embeddings
    smooth = (original / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    smooth = smooth.clamp(0, 1)  # 0: low frequency, divided by the factor; 1: high frequency, kept
    return theta * (smooth + (1 - smooth) / scaling.factor)


def cos_sin(positions: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
    """Rotation tables [cos, cos] and [-sin, sin], (1 or b, s, 1, d) float32, for positions (s) or (b, s)."""
    angles = positions.to(theta.device, torch.float32)[..., None] * theta  # (..., s, d/2)
    angles = angles.unflatten(-2, (-1, 1))  # (..., s, 1, d/2)
    if angles.dim() == 3:
        angles = angles[None]  # (1, s, 1, d/2)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


class _Rotate(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin), None, None  # the transpose of a rotation is its inverse


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    # [x1·cos - x2·sin, x2·cos + x1·sin] as x·[cos, cos] + [x2, x1]·[-sin, sin]: two passes over complete heads, where
    # separate halves would take seven passes over short rows.
    wide = x.to(cos.dtype)
    first, second = wide.chunk(2, -1)
    return torch.cat((second, first), -1).mul_(sin).addcmul_(wide, cos).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads x (b, s, heads, d) by the tables of `cos_sin`, computed in their dtype; returns x's dtype."""
    return _Rotate.apply(x, cos, sin)
