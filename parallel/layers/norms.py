"""RMSNorm and LayerNorm of hidden states, replicated over the tensor axis; RMSNorms of heads.

Hidden states may be full or sequence-parallel. Query and key heads are sharded over the tensor axis, and are normalized
individually (`HeadNorm`), or all of a token's together (`ProjectionNorm`), which all-reduces a sum per token, in backward too.
Linear attention has norms of its queries and keys (`unit_norm`) and of its output (`GatedHeadNorm`).
"""

from __future__ import annotations

from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from parallel import collectives
from parallel.backward import needs_gradient
from parallel.initialization import Constant
from parallel.layout import Initializer, Layout, Placement, Section, layout_of, parameter
from parallel.mesh import Axis, Mesh
from parallel.torch_internals import fused_rms_norm

ONES, ZEROS = Constant(1.0), Constant(0.0)


class _RMSNorm(Function):
    """torch's fused forward with a custom backward: torch's own takes three times as long on CPUs.

    With x̂ = x·r, r = 1/sqrt(mean(x²) + ε) and g the gradient of y = x̂·w:
    dw = Σ g·x̂ over tokens, dx = r·(g·w - x̂·mean(g·w·x̂)).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        # All in float32: the fused kernel takes one dtype, and the mixed-dtype path is slower than the conversions.
        wide = torch.promote_types(x.dtype, torch.float32)
        y, inverse = fused_rms_norm(x.to(wide), weight.shape, weight.to(wide), epsilon)
        ctx.save_for_backward(x, weight, inverse)
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, inverse = ctx.saved_tensors
        hat = x.to(inverse.dtype) * inverse  # (tokens, h)
        needed = needs_gradient(ctx, 0), needs_gradient(ctx, 1)
        of_x, of_weight = _norm_gradients(grad.to(hat.dtype), hat, weight.to(hat.dtype), inverse, *needed)
        return _cast(of_x, x.dtype), _cast(of_weight, weight.dtype), None


def _norm_gradients(
    grad: Tensor, hat: Tensor, weight: Tensor, inverse: Tensor, needs_x: bool, needs_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of x (..., h) and w, from those of x̂·w; None if they are not needed."""
    product = grad * hat
    of_weight = product.flatten(0, -2).sum(0) if needs_weight else None
    if not needs_x:
        return None, of_weight
    mean = (product @ weight).mul_(-1 / hat.shape[-1])[..., None]  # (..., 1)
    return torch.addcmul(grad * weight, hat, mean).mul_(inverse), of_weight


def _cast(gradient: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if gradient is None else gradient.to(dtype)


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
        initializer: Initializer = ONES,
        **placed: Unpack[Placement],
    ) -> None:
        super().__init__()
        self.epsilon = epsilon
        partial_axes = ("tensor",) if sequence_parallel and axis.size > 1 else ()
        self.weight = parameter(
            Layout((Section("", (hidden,), None),), axis.size, initializer, partial_axes), **placed
        )

    def forward(self, x: Tensor) -> Tensor:
        return _RMSNorm.apply(x, self.weight, self.epsilon)


class UnitOffsetNorm(RMSNorm):
    """x / sqrt(mean(x²) + ε) · (1 + w), with w initially zero (Gemma, Qwen3-Next); otherwise as RMSNorm."""

    def __init__(self, hidden: int, axis: Axis, *, initializer: Initializer = ONES, **arguments: Any) -> None:
        super().__init__(hidden, axis, initializer=ZEROS, **arguments)

    def forward(self, x: Tensor) -> Tensor:
        return _RMSNorm.apply(
            x, self.weight.to(torch.promote_types(x.dtype, torch.float32)) + 1, self.epsilon
        )


class CenteredNorm(RMSNorm):
    """LayerNorm without bias over the last dim, (x - mean) / sqrt(var + ε) · w; arguments as for RMSNorm."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, None, self.epsilon)


class LayerNorm(RMSNorm):
    """(x - mean) / sqrt(var + ε) · w + b (arXiv 1607.06450), over the last dim. Arguments as for RMSNorm."""

    def __init__(self, hidden: int, axis: Axis, **arguments: Any) -> None:
        super().__init__(hidden, axis, **arguments)
        weight = layout_of(self.weight)
        layout = Layout(weight.sections, axis.size, Constant(0.0), weight.partial_axes)
        self.bias = parameter(layout, self.weight.dtype, self.weight.device)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)


class _HeadRMSNorm(Function):
    """`_RMSNorm` of heads (..., n, d) with a weight (n, d)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        hat, inverse = fused_rms_norm(x.to(wide), x.shape[-1:], None, epsilon)
        ctx.save_for_backward(x, weight, inverse)
        return (hat * weight.to(wide)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, inverse = ctx.saved_tensors
        wide, vectors, of_x = inverse.dtype, weight.to(inverse.dtype), None
        grad = grad.to(wide)
        hat = x.to(wide) * inverse  # (..., n, d)
        product = grad * hat
        if needs_gradient(ctx, 0):
            mean = (product * vectors).mean(-1, keepdim=True)  # (..., n, 1)
            of_x = torch.addcmul(grad * vectors, hat, mean, value=-1).mul_(inverse).to(x.dtype)
        of_weight = product.flatten(0, -3).sum(0).to(weight.dtype) if needs_gradient(ctx, 1) else None
        return of_x, of_weight, None


class HeadNorm(nn.Module):
    """RMSNorm of each query and key head (Qwen3), with one weight (d) for query heads, one for key heads.

    Args:
        head_dim: d.
        axis: tensor axis, over which heads are sharded and the weights replicated; their gradients are partial sums.
        unit_offset: whether heads are multiplied by 1 + w, with w initially zero.
    """

    def __init__(
        self,
        head_dim: int,
        axis: Axis,
        *,
        epsilon: float = 1e-6,
        unit_offset: bool = False,
        **placed: Unpack[Placement],
    ) -> None:
        super().__init__()
        self.epsilon, self.unit_offset = epsilon, unit_offset
        sections = tuple(Section(name, (head_dim,), None) for name in ("q", "k"))
        partial_axes = ("tensor",) if axis.size > 1 else ()
        initial = ZEROS if unit_offset else ONES
        self.weight = parameter(Layout(sections, axis.size, initial, partial_axes), **placed)

    def forward(self, qk: Tensor, heads: int) -> Tensor:
        """Normalize heads (..., n + k, d), of which the first n = `heads` are query heads."""
        weight: Tensor = self.weight
        if self.unit_offset:
            weight = weight.to(torch.promote_types(qk.dtype, torch.float32)) + 1
        q, k = weight.view(2, 1, -1).unbind()  # (1, d) each
        weight = torch.cat((q.expand(heads, -1), k.expand(qk.shape[-2] - heads, -1)))  # (n + k, d)
        return _HeadRMSNorm.apply(qk, weight, self.epsilon)


class _ProjectionRMSNorm(Function):
    """`_RMSNorm` of heads (..., n, d) with a weight (n, d), over all `size` elements of an axis."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, axis: Axis, size: int, epsilon: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = collectives.all_reduce(wide.square().sum((-2, -1), keepdim=True), axis)
        inverse = torch.rsqrt(squares / size + epsilon)  # (..., 1, 1)
        ctx.save_for_backward(x, weight, inverse)
        ctx.axis, ctx.size = axis, size
        return (wide * inverse * weight.to(wide.dtype)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, weight, inverse = ctx.saved_tensors
        wide, grad, of_x, of_weight = x.to(inverse.dtype), grad.to(inverse.dtype), None, None
        # Not of x̂ = x·r: forward computes it too, after a collective, so that compiled graphs would save it in float32.
        product = grad * wide  # (..., n, d)
        if needs_gradient(ctx, 1):
            of_weight = (product * inverse).flatten(0, -3).sum(0).to(weight.dtype)  # (n, d)
        if needs_gradient(ctx, 0):
            scale = weight.to(inverse.dtype)
            sums = collectives.all_reduce(product.mul_(scale).sum((-2, -1), keepdim=True), ctx.axis)
            del product
            mean = sums * inverse**3 / -ctx.size  # (..., 1, 1)
            of_x = torch.addcmul((grad * scale).mul_(inverse), wide, mean).to(x.dtype)
        return of_x, of_weight, None, None, None


class ProjectionNorm(nn.Module):
    """RMSNorm over all query or all key heads of a token together, with a weight per element (OLMo 2).

    Args:
        heads: of the model: n or k.
        head_dim: d.
        mesh: its tensor axis shards the heads.
        replicas: number of neighbouring tensor ranks that hold the same head, as for KV heads.
    """

    def __init__(
        self,
        heads: int,
        head_dim: int,
        mesh: Mesh,
        replicas: int = 1,
        *,
        epsilon: float = 1e-6,
        **placed: Unpack[Placement],
    ) -> None:
        super().__init__()
        self.size, self.axis, self.replicas, self.epsilon = heads * head_dim, mesh.tensor, replicas, epsilon
        section = Section("", (self.size,), 0, replicas)
        # Each replica sees the gradient from its own query heads only.
        partial_axes = ("kv_replica",) if replicas > 1 else ()
        self.weight = parameter(Layout((section,), self.axis.size, Constant(1.0), partial_axes), **placed)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize this rank's heads (..., n/t, d)."""
        weight = self.weight.view(x.shape[-2:])
        return _ProjectionRMSNorm.apply(x, weight, self.axis, self.size * self.replicas, self.epsilon)


class _GatedRMSNorm(Function):
    """`_RMSNorm` times silu(gate), of which autograd would save four more tensors, two of them in float32.

    With z the gate and n = x̂·w: dz = silu'(z) applied to g·n, and the gradient of n is g·silu(z).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        y, inverse = fused_rms_norm(x.to(wide), weight.shape, weight.to(wide), epsilon)
        ctx.save_for_backward(x, gate, weight, inverse)
        return (y * F.silu(gate.to(wide))).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, gate, weight, inverse = ctx.saved_tensors
        wide, of_gate = inverse.dtype, None
        grad, z, vector = grad.to(wide), gate.to(wide), weight.to(wide)
        hat = x.to(wide) * inverse  # (..., u)
        if needs_gradient(ctx, 1):
            of_gate = torch.ops.aten.silu_backward(grad * hat * vector, z).to(gate.dtype)
        needed = needs_gradient(ctx, 0), needs_gradient(ctx, 2)
        of_x, of_weight = _norm_gradients(grad * F.silu(z), hat, vector, inverse, *needed)
        return _cast(of_x, x.dtype), of_gate, _cast(of_weight, weight.dtype), None


class GatedHeadNorm(RMSNorm):
    """RMSNorm of each head, with one weight (u) for all, times silu(gate) (Gated DeltaNet).

    Args:
        head_dim: u.
        axis: tensor axis, over which heads are sharded and the weight replicated; its gradient is a partial sum.
    """

    def __init__(
        self, head_dim: int, axis: Axis, *, epsilon: float = 1e-6, **placed: Unpack[Placement]
    ) -> None:
        super().__init__(head_dim, axis, epsilon=epsilon, sequence_parallel=True, **placed)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        """Normalize heads x (..., u) and multiply them by the activated gate (..., u)."""
        return _GatedRMSNorm.apply(x, gate, self.weight, self.epsilon)


class _UnitNorm(Function):
    """With u = x·r, r = 1 / sqrt(Σ x² + ε), and y = scale·u: dx = scale·r·(g - u·(g·u))."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, epsilon: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        inverse = torch.rsqrt((wide * wide).sum(-1, keepdim=True) + epsilon)
        ctx.save_for_backward(x, inverse)
        ctx.scale = scale
        return wide * (inverse * scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, inverse = ctx.saved_tensors
        unit = x.to(grad.dtype) * inverse
        along = (grad * unit).sum(-1, keepdim=True)
        return torch.addcmul(grad, unit, along, value=-1).mul_(inverse * ctx.scale).to(x.dtype), None, None


def unit_norm(x: Tensor, scale: float = 1.0, epsilon: float = 1e-6) -> Tensor:
    """Heads (..., d) of length `scale`, in float32 or wider: x · scale / sqrt(Σ x² + ε)."""
    return _UnitNorm.apply(x, scale, epsilon)
