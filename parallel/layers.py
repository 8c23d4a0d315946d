"""Tensor-parallel linear layers and embedding.

With Y = X Wᵀ over t ranks (Megatron-LM, arXiv 1909.08053):

    column    W = [W1; ...; Wt] by rows      Yi = X Wiᵀ          backward: dX = Σ dYi Wi
    row       W = [W1, ..., Wt] by columns   Y = Σ Xi Wiᵀ        backward: dXi = dY Wi

Hidden states are tokens × features, (b·s, h). With sequence parallelism (arXiv 2205.05198) each rank holds the tokens
(b·s/t, h) between the layers; column layers gather them, row layers reduce and scatter them: the same bytes as one
all-reduce, and norms and residuals cost a t-th of the memory. The gathered input is not kept but gathered again in backward.

In backward the collective runs while the other matrix product is computed: the reduction of dX under dW, the second
gather of X under dX.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from parallel import collectives
from parallel.backward import wanted
from parallel.initialization import Constant, Initializer, Normal
from parallel.layout import Layout, Section, parameter
from parallel.mesh import Axis


class ColumnLinear(Function):
    """X (b·s, h) or (b·s/t, h) -> Y (b·s, o/t)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis, sequence: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.axis, ctx.sequence, ctx.bias = axis, sequence, bias is not None
        if sequence:
            x = collectives.all_gather(x, axis)  # (b·s, h)
        return F.linear(x, weight, bias)  # (b·s, o/t)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x, whole_x = column_input_gradient(ctx, grad, x, weight)
        grad_weight = grad.t() @ whole_x if whole_x is not None else None  # (o/t, h)
        grad_bias = grad.sum(0) if ctx.bias and wanted(ctx, 2) else None
        return grad_x.wait() if grad_x else None, grad_weight, grad_bias, None, None


def column_input_gradient(
    ctx: Any, grad: Tensor, x: Tensor, weight: Tensor
) -> tuple[collectives.StartedReduce | collectives.StartedAllReduce | None, Tensor | None]:
    """The begun reduction of dX = Σ dYi Wi, to wait for after dW, and the whole X (b·s, h) for dW; None where not wanted."""
    gathering = grad_x = None
    if wanted(ctx, 1):
        x = collectives.after(x, grad) if ctx.sequence else x
        gathering = collectives.start_all_gather(x, ctx.axis) if ctx.sequence else x
    if wanted(ctx, 0):
        start = collectives.start_reduce_scatter if ctx.sequence else collectives.start_all_reduce
        grad_x = start(grad @ weight, ctx.axis)
    if gathering is not None and ctx.sequence:
        gathering = collectives.wait(gathering)
    return grad_x, gathering


class RowLinear(Function):
    """X (b·s, i/t) -> Y (b·s, h) or (b·s/t, h), summed over the axis."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, axis: Axis, sequence: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.axis, ctx.sequence = axis, sequence
        y = F.linear(x, weight)  # (b·s, h), this rank's term
        return collectives.reduce_scatter(y, axis) if sequence else collectives.all_reduce(y, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if ctx.sequence:
            grad = collectives.all_gather(grad, ctx.axis)  # (b·s, h)
        grad_x = grad @ weight if wanted(ctx, 0) else None
        return grad_x, grad.t() @ x if wanted(ctx, 1) else None, None, None


class ColumnParallelLinear(nn.Module):
    """Y = X Wᵀ + b with W split by rows; several weights may be stacked into one product ([gate; up]).

    Args:
        in_features: h.
        out_features: o, or the sizes of the stacked sections by name, each split by itself: a rank holds
            [gate_t; up_t] and its output is (b·s, gate/t + up/t).
        axis: the tensor axis.
        bias: whether there is one; split like the rows.
        sequence_parallel: whether the input is (b·s/t, h).
        initializer: of the weight; biases start at zero.

    Raises:
        ValueError: a size that the axis does not divide; an input of another width.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | Mapping[str, int],
        axis: Axis,
        *,
        bias: bool = False,
        sequence_parallel: bool = False,
        initializer: Initializer | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        sizes = {"": out_features} if isinstance(out_features, int) else dict(out_features)
        for name, size in sizes.items():
            divides(self, f"out_features{f'[{name}]' if name else ''}", size, axis)
        self.in_features, self.axis = in_features, axis
        self.sequence = sequence_parallel and axis.size > 1
        initializer = initializer or Normal(0.02)
        rows = tuple(Section(name, (size, in_features), 0) for name, size in sizes.items())
        self.weight = parameter(Layout(rows, axis.size, initializer), dtype, device)
        self.bias = None
        if bias:
            entries = tuple(Section(name, (size,), 0) for name, size in sizes.items())
            self.bias = parameter(Layout(entries, axis.size, Constant(0.0)), dtype, device)

    def forward(self, x: Tensor) -> Tensor:
        check_width(self, x, self.in_features)
        if self.axis.size == 1:
            return F.linear(x, self.weight, self.bias)
        return ColumnLinear.apply(x, self.weight, self.bias, self.axis, self.sequence)


class RowParallelLinear(nn.Module):
    """Y = Σ Xi Wiᵀ + b with W split by columns; b is added once, after the sum.

    Args:
        in_features: i, of which a rank's input holds i/t.
        out_features: h.
        axis: the tensor axis.
        sequence_parallel: whether the output is (b·s/t, h).

    Raises:
        ValueError: in_features that the axis does not divide; an input of another width.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        axis: Axis,
        *,
        bias: bool = False,
        sequence_parallel: bool = False,
        initializer: Initializer | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        divides(self, "in_features", in_features, axis)
        self.in_features, self.axis = in_features, axis
        self.sequence = sequence_parallel and axis.size > 1
        columns = Section("", (out_features, in_features), 1)
        self.weight = parameter(Layout((columns,), axis.size, initializer or Normal(0.02)), dtype, device)
        self.bias = None
        if bias:
            whole = Section("", (out_features,), None)
            self.bias = parameter(
                Layout((whole,), axis.size, Constant(0.0), ("tensor",) if self.sequence else ()),
                dtype,
                device,
            )

    def forward(self, x: Tensor) -> Tensor:
        check_width(self, x, self.in_features // self.axis.size)
        if self.axis.size == 1:
            return F.linear(x, self.weight, self.bias)
        y = RowLinear.apply(x, self.weight, self.axis, self.sequence)
        return y if self.bias is None else y + self.bias


class VocabParallelEmbedding(nn.Module):
    """Token embedding with the vocabulary split by rows: a rank looks its own tokens up and the sum over the axis is whole.

    Args:
        vocabulary: v; where the axis does not divide it, the last shards are padded by rows that no token reaches.
        hidden: h.
        axis: the tensor axis.
        sequence_parallel: whether the output is (b·s/t, h).
        partial: axes along which the weight's gradient is partial (`Layout.partial`).
    """

    def __init__(
        self,
        vocabulary: int,
        hidden: int,
        axis: Axis,
        *,
        sequence_parallel: bool = False,
        partial: tuple[str, ...] = (),
        initializer: Initializer | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.axis = axis
        self.sequence = sequence_parallel and axis.size > 1
        rows = Section("", (vocabulary, hidden), 0)
        layout = Layout((rows,), axis.size, initializer or Normal(0.02), partial)
        self.weight = parameter(layout, dtype, device)
        self.register_buffer("first", first_row(layout, axis, device), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """(b, s) token ids -> (b·s, h) or (b·s/t, h)."""
        tokens = tokens.flatten()  # (b·s)
        if self.axis.size == 1:
            return F.embedding(tokens, self.weight)
        rows = tokens - self.first
        own = (rows >= 0) & (rows < self.weight.shape[0])
        x = F.embedding(rows.where(own, 0), self.weight) * own[:, None]  # (b·s, h), zero where another rank's
        return (collectives.scatter_reduce if self.sequence else collectives.reduce)(x, self.axis)


class Embedding(nn.Module):
    """Embedding with the whole table on every rank, for tables that are small (learned positions).

    Args:
        rows: ids are below it.
        hidden: h.
        axis: the tensor axis, over which the table is replicated.
        sequence_parallel: whether the output is (b·s/t, h); the table's gradient is then partial.
    """

    def __init__(
        self,
        rows: int,
        hidden: int,
        axis: Axis,
        *,
        sequence_parallel: bool = False,
        initializer: Initializer | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.axis = axis
        self.sequence = sequence_parallel and axis.size > 1
        whole, partial = Section("", (rows, hidden), None), ("tensor",) if self.sequence else ()
        layout = Layout((whole,), axis.size, initializer or Normal(0.02), partial)
        self.weight = parameter(layout, dtype, device)

    def forward(self, ids: Tensor) -> Tensor:
        """(b, s) ids -> (b·s, h) or (b·s/t, h)."""
        ids = ids.flatten()  # (b·s)
        return F.embedding(collectives.own_piece(ids, self.axis) if self.sequence else ids, self.weight)


def first_row(layout: Layout, axis: Axis, device: torch.device | str | None) -> Tensor:
    """Number of the first vocabulary row on this rank, as a tensor: a Python number would give each rank its own graph."""
    # A buffer is built where the model is; on the meta device it has no value, and needs none.
    return torch.tensor(axis.rank * layout.local_shape()[0], device=device)


def divides(layer: nn.Module, what: str, size: int, axis: Axis) -> None:
    """Raise ValueError unless the axis divides the size."""
    if size % axis.size:
        name, degree = type(layer).__name__, axis.size
        nearest = sorted({size // degree * degree or degree, -(-size // degree) * degree})
        raise ValueError(
            f"{name}: {what} = {size} does not divide over {axis.name} = {degree}; "
            f"nearest sizes that do: {', '.join(map(str, nearest))}"
        )


def check_width(layer: nn.Module, x: Tensor, width: int) -> None:
    """Raise ValueError unless x is (tokens, width) of the weight's type, before any rank enters a collective."""
    if x.shape[-1] != width or x.dim() != 2:
        raise ValueError(
            f"{type(layer).__name__}: input of shape {tuple(x.shape)}, expected (tokens, {width})"
        )
    if x.dtype != layer.weight.dtype:
        raise ValueError(f"{type(layer).__name__}: input is {x.dtype}, the weight {layer.weight.dtype}")
