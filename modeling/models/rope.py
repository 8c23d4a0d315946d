"""Rotary position embedding (RoPE, arXiv 2104.09864), in the half-split order of Hugging Face's Llama.

Pair i of a head, (x_i, x_{i + d/2}), is rotated by the angle position · θ_i, with θ_i = base^(-2i/d). Scalings of
θ extend the context: "linear" divides every θ by a factor (arXiv 2306.15595); "llama3" divides the low frequencies,
keeps the high ones and interpolates between (Llama 3.1); "yarn" does so by the number of turns within the original context, and
also multiplies queries and keys by a factor (arXiv 2309.00071). DeepSeek-V3 rotates a part of each head, with adjacent elements
as pairs.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from profiles.sections.model import Model
from profiles.sections.rope import YarnRope


def inverse_frequencies(model: Model) -> Tensor:
    """θ (d/2), scaled, in radians per position, float32; d: number of rotated elements of a head.

    Each operation and its order are those of transformers, so that the bits are too: at position 10^5, an error in the last bit
    of θ is an error of 0.01 radians.
    """
    d, scaling = model.rotary_dim, model.rope_scaling
    wavelengths = model.rope_theta ** (torch.arange(0, d, 2, dtype=torch.int64).float() / d)  # over 2π
    theta = 1.0 / wavelengths
    if scaling is None:
        return theta
    if scaling.rope_type == "linear":
        return theta / scaling.factor
    if scaling.rope_type == "yarn":
        smooth = _yarn(d, model.rope_theta, scaling)
        return 1.0 / (scaling.factor * wavelengths) * (1 - smooth) + theta * smooth
    # llama3: by wavelength, relative to the context length of the original training
    wavelength = 2 * math.pi / theta
    original = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = (original / wavelength - low) / (high - low)
    between = (1 - smooth) * theta / scaling.factor + smooth * theta
    scaled = torch.where(wavelength > original / low, theta / scaling.factor, between)
    return torch.where(wavelength < original / high, theta, scaled)


def _yarn(d: int, base: float, scaling: YarnRope) -> Tensor:
    """(d/2) from 0, for low frequencies, which are divided by the factor, to 1, for those that are kept."""
    original = scaling.original_max_position_embeddings

    def pair(turns: float) -> float:
        """Index i of the pair that makes this many turns within the original context."""
        return d * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, d - 1)
    if low == high:
        high += 0.001
    ramp = (torch.arange(d // 2, dtype=torch.float32) - low) / (high - low)
    return 1 - ramp.clamp(0, 1)


def attention_factor(model: Model) -> float:
    """Factor by which queries and keys are multiplied when they are rotated."""
    scaling = model.rope_scaling
    if scaling is None or scaling.rope_type != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return _magnitude(scaling, scaling.mscale) / _magnitude(scaling, scaling.mscale_all_dim)
    return _magnitude(scaling, 1.0)


def score_factor(model: Model) -> float:
    """Attention score factor besides 1/√d, where YaRN scales complete heads (`mscale_all_dim`)."""
    scaling = model.rope_scaling
    if scaling is None or scaling.rope_type != "yarn" or not scaling.mscale_all_dim:
        return 1.0
    return _magnitude(scaling, scaling.mscale_all_dim) ** 2


def _magnitude(scaling: YarnRope, weight: float) -> float:
    return 0.1 * weight * math.log(scaling.factor) + 1


def cos_sin(positions: Tensor, theta: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Rotation tables [cos, cos] and [-sin, sin], (1 or b, s, 1, d) float32, for positions (s) or (b, s).

    Args:
        factor: `attention_factor`, by which the tables are multiplied.
    """
    angles = positions.to(theta.device, torch.float32)[..., None] * theta  # (..., s, d/2)
    angles = angles.unflatten(-2, (-1, 1))  # (..., s, 1, d/2)
    if angles.dim() == 3:
        angles = angles[None]  # (1, s, 1, d/2)
    cos, sin = angles.cos(), angles.sin()
    if factor != 1:
        cos, sin = cos * factor, sin * factor
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def split_pairs(x: Tensor) -> Tensor:
    """Reorder heads (..., d) of adjacent pairs (x_2i, x_2i+1): all first elements, then all second ones."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


class _Rotate(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin), None, None  # the transpose of a rotation turns back


class _SplitRotated(Function):
    """`split_rotated`; backward writes one tensor, which autograd would sum of three."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, heads: int, both: int, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.both = both
        qk = _rotate(qkv[:, :, :both], cos, sin).transpose(1, 2)  # (b, n + k, s, d)
        return qk[:, :heads], qk[:, heads:], qkv[:, :, both:].transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, of_q: Tensor, of_k: Tensor, of_v: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        qk, v = torch.cat((of_q.transpose(1, 2), of_k.transpose(1, 2)), 2), of_v.transpose(1, 2)
        result = qk.new_empty(*qk.shape[:2], ctx.both + v.shape[2], qk.shape[3])
        result[:, :, ctx.both :] = v
        torch.addcmul(_swapped(qk).mul_(-sin), qk, cos, out=result[:, :, : ctx.both])
        return result, None, None, None, None


def split_rotated(
    qkv: Tensor, heads: int, both: int, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Q and K heads, rotated, and V heads (b, heads, s, d) of (b, s, n + 2k, d) in the tables' dtype.

    Args:
        heads: n.
        both: n + k.
    """
    return _SplitRotated.apply(qkv, heads, both, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    # [x1·cos - x2·sin, x2·cos + x1·sin] as x·[cos, cos] + [x2, x1]·[-sin, sin]: two passes over complete heads, where
    # separate halves would take seven passes over short rows.
    wide = x.to(cos.dtype)
    return _swapped(wide).mul_(sin).addcmul_(wide, cos).to(x.dtype)


def _swapped(x: Tensor) -> Tensor:
    """[x2, x1] of heads (..., d) with the halves [x1, x2]."""
    first, second = x.chunk(2, -1)
    return torch.cat((second, first), -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads x (b, s, heads, d) by `cos_sin`'s tables, computed in their dtype; returns x's dtype."""
    return _Rotate.apply(x, cos, sin)
