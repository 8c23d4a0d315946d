"""Matrix products of linear layers: in the tensors' dtype, or in FP8 with dynamic scales.

A linear layer Y = X Wᵀ has three products, whose factors are both quantized along the dim that is summed over:

    forward           X Wᵀ    e4m3 × e4m3
    input gradient    dY W    dY × e4m3
    weight gradient   dYᵀ X   dY × e4m3

    recipe       one scale per                                       format of dY
    tensorwise   tensor: its largest value / the format's            e5m2
    rowwise      row of a factor, rounded up to a power of two       e4m3
    mxfp8        32 values of a row, a power of two (OCP MX 1.0)     e4m3

Products are summed in float32 by the tensor cores and returned in the factors' dtype; weights, activations, gradients and tensors
saved for backward keep their dtype (arXiv 2209.05433). Layers here are Functions that overlap their products with collectives,
which torchao's replacement of nn.Linear does not support, so the few lines of scaling are our own.

`emulated` runs the same quantization on any device and multiplies the dequantized factors in float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import ScalingType, SwizzleType

from parallel.activation_checkpointing import always_save
from parallel.backward import needs_gradient
from parallel.collectives import all_reduce_max
from parallel.host_products import multiply, uses_onednn
from parallel.mesh import Axis
from parallel.torch_internals import custom_op, scaled_mm

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MX_BLOCK = 32
# Smallest scale, for rows of zeros: below it, float32 has fewer bits. Relative to a format's largest value, it is the smallest
# magnitude that is scaled as every other is.
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
EMULATED = " emulated"

Factor = tuple[Tensor, Tensor | None]
"""A factor (m, k) whose dim 1 a product sums over, and its scales if it is quantized."""


class Products:
    """The three products of a linear layer in the dtype of the tensors.

    Attributes:
        scales_rows: whether each row of a factor has its own scales.
    """

    scales_rows = False

    @property
    def name(self) -> str:
        """The argument of `named`, for operators."""
        return ""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """X (m, k), W (n, k) -> X Wᵀ + bias (m, n)."""
        return multiply(x, weight.t(), bias)

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        """dY (m, n), W (n, k) -> dX (m, k)."""
        return multiply(grad, weight)

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        """dY (m, n), X (m, k) -> dW (n, k)."""
        return multiply(grad.t(), x)

    def left(self, x: Tensor, gradient: bool = False, axis: Axis | None = None) -> Factor:
        """The left factor x of `multiply_factors`.

        Args:
            gradient: whether x is a gradient.
            axis: over which x is a local shard; the values are then those of the gathered x.
        """
        return x, None

    def right(self, x: Tensor) -> Factor:
        """The right factor x of `multiply_factors`."""
        return x, None

    def multiply_factors(
        self, a: Factor, b: Factor, dtype: torch.dtype, bias: Tensor | None = None, gradient: bool = False
    ) -> Tensor:
        """a (m, k), b (n, k) -> a bᵀ + bias (m, n) in the dtype of the tensors; `gradient` as for `left`."""
        return multiply(a[0], b[0].t(), bias)

    def element_size(self, x: Tensor) -> int:
        """Bytes of an element of x as a factor."""
        return x.element_size()


EXACT = Products()


def named(name: str) -> Products:
    """The products with this `name`."""
    return Float8(name.removesuffix(EMULATED), name.endswith(EMULATED)) if name else EXACT


def is_plain(products: Products, axis: Axis) -> bool:
    """Whether `linear` computes the same as a Function with these products, and as fast."""
    return products is EXACT and axis.size == 1


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """X (m, k), W (n, k) -> X Wᵀ + bias (m, n), by torch's linear layer or, if faster, by oneDNN."""
    if not uses_onednn(x, len(weight)):
        return F.linear(x, weight, bias)
    # Saved for backward before the product, as in torch's own: recomputation stops there, and omits a block's last product.
    x = _SavedFactors.apply(x, weight.detach())
    return _Linear.apply(x, weight, bias, x.grad_fn)


class _SavedFactors(Function):
    """Identity of X whose node saves X and W for `_Linear`; without a node if X needs no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Linear(Function):
    """X Wᵀ + bias; `saved` is the node of `_SavedFactors`, if there is one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, saved: Any) -> Tensor:
        if saved is None:
            ctx.save_for_backward(x, weight)
        ctx.saved, ctx.bias = saved, bias is not None
        return EXACT.forward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = (ctx.saved or ctx).saved_tensors
        grad_x = EXACT.input_gradient(grad, weight) if needs_gradient(ctx, 0) else None
        grad_weight = EXACT.weight_gradient(grad, x) if needs_gradient(ctx, 1) else None
        return grad_x, grad_weight, grad.sum(0) if ctx.bias and needs_gradient(ctx, 2) else None, None


@dataclass(frozen=True)
class Float8(Products):
    """The three products in FP8; every dim of the factors must be a multiple of FP8_MULTIPLE[recipe].

    Args:
        recipe: one of FP8_MULTIPLE.
        emulated: whether to multiply dequantized factors, on devices without FP8 products.
    """

    recipe: str
    emulated: bool = False

    @property
    def name(self) -> str:
        return self.recipe + (EMULATED if self.emulated else "")

    @property
    def scales_rows(self) -> bool:  # type: ignore[override]
        return self.recipe != "tensorwise"

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.multiply_factors(self.left(x), self.right(weight), x.dtype, bias)

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        return self.multiply_factors(self.left(grad, True), self.right(weight.t()), grad.dtype, gradient=True)

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        return self.multiply_factors(self.left(grad.t(), True), self.right(x.t()), grad.dtype, gradient=True)

    def left(self, x: Tensor, gradient: bool = False, axis: Axis | None = None) -> Factor:
        wide = gradient and self.recipe == "tensorwise"
        return quantize(x, self.recipe, E5M2 if wide else E4M3, axis)

    def right(self, x: Tensor) -> Factor:
        return quantize(x, self.recipe, E4M3)

    def element_size(self, x: Tensor) -> int:
        return 1

    def multiply_factors(
        self, a: Factor, b: Factor, dtype: torch.dtype, bias: Tensor | None = None, gradient: bool = False
    ) -> Tensor:
        (a8, a_scale), (b8, b_scale) = a, b
        assert a_scale is not None
        assert b_scale is not None
        # Gradients do not allow to sum in fewer bits.
        y = self.multiply((a8, a_scale), (b8, b_scale), dtype, fast=not gradient)
        return y if bias is None else y + bias

    def multiply(
        self, a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], dtype: torch.dtype, fast: bool = False
    ) -> Tensor:
        """Values and scales of a (m, k) and b (n, k), as `quantize` returns them -> a bᵀ (m, n) in a dtype."""
        (a8, a_scale), (b8, b_scale) = a, b
        if self.emulated:
            return (dequantize(a8, a_scale) @ dequantize(b8, b_scale).t()).to(dtype)
        if self.recipe == "mxfp8":
            return mx_product(a8, b8, a_scale, b_scale, dtype)
        kind = ScalingType.TensorWise if self.recipe == "tensorwise" else ScalingType.RowWise
        factors = (a8, b8.t(), a_scale, kind, b_scale.t(), kind)
        return F.scaled_mm(*factors, output_dtype=dtype, use_fast_accum=fast)


@custom_op("trainshed::mx_product")
def mx_product(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """a (m, k) and b (n, k) in e4m3, with their scales of `quantize` -> a bᵀ (m, n).

    An operator, because inductor of torch 2.13 does not compile products with swizzled scales.
    """
    scales = [swizzle(scale.squeeze(-1)).to(torch.float8_e8m0fnu) for scale in (a_scale, b_scale)]
    kind, order = ScalingType.BlockWise1x32, SwizzleType.SWIZZLE_32_4_4
    factors = (a, b.t(), scales[0], kind, scales[1], kind, order, order)
    return F.scaled_mm(*factors, output_dtype=dtype)


@mx_product.register_fake
def _(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    return a.new_empty(len(a), len(b), dtype=dtype)


always_save(scaled_mm.default)
always_save(torch.ops.trainshed.mx_product.default)


def quantize(x: Tensor, recipe: str, dtype: torch.dtype, axis: Axis | None = None) -> tuple[Tensor, Tensor]:
    """x (m, k) -> row-major FP8 values (m, k) and float32 scales (1, 1), (m, 1) or (m, k/32, 1).

    Args:
        axis: over which x is a local shard, whose tensorwise scale is that of the whole tensor.
    """
    wide, largest = x.float().contiguous(), torch.finfo(dtype).max
    tiny = SMALLEST_SCALE * largest
    if recipe == "mxfp8":
        blocks = wide.unflatten(1, (-1, MX_BLOCK))  # (m, k/32, 32)
        highest = blocks.abs().amax(2, keepdim=True).clamp_min(tiny)
        exponent = highest.log2().floor() - math.floor(math.log2(largest))
        scale = exponent.exp2()  # (m, k/32, 1); values between largest and 2^(e + 1) saturate
        scaled = (blocks / scale).flatten(1)
    elif recipe == "rowwise":
        scale = (wide.abs().amax(1, keepdim=True).clamp_min(tiny) / largest).log2().ceil().exp2()  # (m, 1)
        scaled = wide / scale
    else:
        highest = wide.abs().amax()
        highest = highest if axis is None else all_reduce_max(highest, axis)
        scale = highest.clamp_min(tiny).view(1, 1) / largest
        scaled = wide / scale
    return scaled.clamp(-largest, largest).to(dtype), scale


def dequantize(x: Tensor, scale: Tensor) -> Tensor:
    """Values and scales of `quantize` -> (m, k) float32."""
    if scale.dim() == 3:
        return (x.float().unflatten(1, (-1, MX_BLOCK)) * scale).flatten(1)
    return x.float() * scale


def swizzle(scales: Tensor) -> Tensor:
    """Reorder scales (m, k/32) for tensor cores (cuBLAS, 1D block scaling factors layout).

    Each tile of 128 × 4 stores row r, column c at (r mod 32) · 16 + ⌊r / 32⌋ · 4 + c.

    Returns:
        flat, with zeros for the rows and columns that pad the last tiles.
    """
    m, k = scales.shape
    padded = F.pad(scales, (0, -k % 4, 0, -m % 128))
    # (row tiles, row / 32, row mod 32, column tiles, column)
    tiles = padded.view(-1, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).flatten()
