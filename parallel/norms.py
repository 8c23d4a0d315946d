"""RMSNorm and LayerNorm, replicated over the tensor axis, for full or sequence-parallel inputs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from parallel.initialization import Constant
from parallel.layout import Layout, Section, parameter
from parallel.mesh import Axis


class _RMSNorm(Function):
    """torch's fused forward with a custom backward: torch's own takes three times as long on CPUs.

    With x̂ = x·r, r = 1/sqrt(mean(x²) + ε) and g the gradient of y = x̂·w:
    dw = Σ g·x̂ over tokens, dx = r·(g·w - x̂·mean(g·w·x̂)).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        # All in float32: the fused kernel takes one dtype, and the mixed-dtype path is slower than the conversions.
        wide = torch.promote_types(x.dtype, torch.float32)
        y, inverse = torch.ops.aten._fused_rms_norm(x.to(wide), weight.shape, weight.to(wide), epsilon)
        ctx.save_for_backward(x, weight, inverse)
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        wide, vector = inverse.dtype, weight.to(inverse.dtype)
        grad = grad.to(wide)
        hat = x.to(wide) * inverse  # (tokens, h)
        product = grad * hat
        mean = (product @ vector).mul_(-1 / x.shape[-1])[:, None]  # (tokens, 1)
        grad_x = torch.addcmul(grad * vector, hat, mean).mul_(inverse)
        return grad_x.to(x.dtype), product.sum(0).to(weight.dtype), None


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + ε) · w (arXiv 1910.07467), over the last dim.

    Input and output are (tokens, h).

    Args:
        hidden: h.
        axis: tensor axis, over which the weight is replicated.
        sequence_parallel: whether the input is (b·s/t, h); the weight's gradient is then a partial sum.
    """

    def __init__(
        self,
        hidden: int,
        axis: Axis,
        *,
        epsilon: float = 1e-5,
        sequence_parallel: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.epsilon = epsilon
        partial_axes = ("tensor",) if sequence_parallel and axis.size > 1 else ()
        self.weight = parameter(
            Layout((Section("", (hidden,), None),), axis.size, Constant(1.0), partial_axes), dtype, device
        )

    def forward(self, x: Tensor) -> Tensor:
        return _RMSNorm.apply(x, self.weight, self.epsilon)


class LayerNorm(RMSNorm):
    """(x - mean) / sqrt(var + ε) · w + b (arXiv 1607.06450), over the last dim. Arguments as for RMSNorm."""

    def __init__(self, hidden: int, axis: Axis, **arguments: Any) -> None:
        super().__init__(hidden, axis, **arguments)
        weight: Layout = self.weight.global_layout
        layout = Layout(weight.sections, axis.size, Constant(0.0), weight.partial_axes)
        self.bias = parameter(layout, self.weight.dtype, self.weight.device)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)
