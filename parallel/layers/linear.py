"""Tensor-parallel linear layers and embedding.

With Y = X Wᵀ over t ranks (Megatron-LM, arXiv 1909.08053):

    column    W = [W1; ...; Wt] by rows      Yi = X Wiᵀ          backward: dX = Σ dYi Wi
    row       W = [W1, ..., Wt] by columns   Y = Σ Xi Wiᵀ        backward: dXi = dY Wi

Hidden states are tokens × features, (b·s, h). With sequence parallelism (arXiv 2205.05198) each rank holds (b·s/t, h) between
the layers; column layers all-gather their input and row layers reduce-scatter their output: the same bytes as one all-reduce,
and norms and residuals take 1/t of the memory. The gathered input is not saved but gathered again in backward.

Backward of column layers overlaps each collective with another product: the reduction of dX with dW, the second gather of X with
dX. The other collectives can overlap only with their own product, in chunks (overlap.py); so can the reduction of dX without dW.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from parallel import collectives
from parallel.activation_checkpointing import recomputing_products
from parallel.backward import needs_gradient
from parallel.initialization import Constant, Normal
from parallel.layers import overlap
from parallel.layers.deferred import DeferrableLinear
from parallel.layers.products import EXACT, Products, linear
from parallel.layout import Initializer, Layout, Placement, Section, parameter
from parallel.mesh import Axis


class ColumnLinear(Function):
    """X (b·s, h) or (b·s/t, h) -> Y (b·s, o/t)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        axis: Axis,
        sequence_parallel: bool,
        products: Products = EXACT,
        output: Tensor | None = None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.axis, ctx.sequence_parallel, ctx.bias = axis, sequence_parallel, bias is not None
        ctx.products, ctx.deferred = products, output is not None
        if not sequence_parallel:
            return products.forward(x, weight, bias)  # (b·s, o/t)
        return overlap.gather_product(x, weight, axis, products, bias=bias)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x, full_x = column_input_gradient(ctx, grad, x, weight)
        grad_weight = column_weight_gradient(ctx, grad, full_x, grad_x) if full_x is not None else None
        grad_bias = grad.sum(0) if ctx.bias and needs_gradient(ctx, 2) else None
        deferred = grad if ctx.deferred else None
        return grad_x.wait() if grad_x else None, grad_weight, grad_bias, None, None, None, deferred


def column_input_gradient(
    ctx: Any, grad: Tensor, x: Tensor, weight: Tensor
) -> tuple[PendingGradient | None, Tensor | None]:
    """Start reducing dX = Σ dYi Wi, to be awaited after dW; return it and the full X (b·s, h) for dW.

    Either is None if the backward pass does not need it.
    """
    needs_x, needs_weight = needs_gradient(ctx, 0), needs_gradient(ctx, 1)
    axis, products, gathers = ctx.axis, ctx.products, ctx.sequence_parallel and needs_weight
    x = collectives.depend_on_gradient(x, grad) if gathers else x
    if needs_x and gathers and overlap.uses_operators(x, axis):
        gathered, unreduced = overlap.gather_beside(x, axis, grad, weight, products)
        return UnreducedGradient(unreduced, axis), gathered
    full_x: Tensor | None = None
    pending: PendingGradient | None = None
    if needs_weight:
        full_x = collectives.start_all_gather(x, axis) if gathers else x
    if needs_x and ctx.sequence_parallel and not needs_weight:
        pending = ReducedGradient(overlap.scatter_product(grad, weight, axis, products, gradient=True))
    elif needs_x:
        grad_x = products.input_gradient(grad, weight)
        if axis.size == 1:
            pending = ReducedGradient(grad_x)
        elif ctx.sequence_parallel:
            pending = collectives.PendingReduceScatter(grad_x, axis)
        else:
            pending = collectives.PendingAllReduce(grad_x, axis)
    if full_x is not None and gathers:
        full_x = collectives.wait(full_x)
    return pending, full_x


def column_weight_gradient(ctx: Any, grad: Tensor, x: Tensor, grad_x: PendingGradient | None) -> Tensor:
    """dW (o/t, h) from dY and the full X, beside the reduction of dX."""
    if isinstance(grad_x, UnreducedGradient):
        return grad_x.reduce_beside(ctx.products, grad, x)
    return ctx.products.weight_gradient(grad, x)


class ReducedGradient:
    """A gradient in place of a pending one."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def wait(self) -> Tensor:
        return self.x


class UnreducedGradient(ReducedGradient):
    """dX of one rank, whose reduction is an operator that also computes another product."""

    def __init__(self, x: Tensor, axis: Axis) -> None:
        super().__init__(x)
        self.axis = axis

    def reduce_beside(self, products: Products, grad: Tensor, x: Tensor) -> Tensor:
        self.x, product = overlap.scatter_beside(self.x, self.axis, grad, x, products)
        return product


PendingGradient = collectives.PendingReduceScatter | collectives.PendingAllReduce | ReducedGradient


class RowLinear(Function):
    """X (b·s, i/t) -> Y (b·s, h) or (b·s/t, h), reduced over the axis."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        axis: Axis,
        sequence_parallel: bool,
        products: Products = EXACT,
        output: Tensor | None = None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.axis, ctx.sequence_parallel, ctx.products = axis, sequence_parallel, products
        ctx.deferred = output is not None
        if not sequence_parallel:
            return collectives.all_reduce(products.forward(x, weight), axis)
        return overlap.scatter_product(x, weight, axis, products)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = needs_gradient(ctx, 0), needs_gradient(ctx, 1)
        products, grad_x, deferred = ctx.products, None, grad if ctx.deferred else None
        if needs_x and ctx.sequence_parallel:
            grad_x, gathered = overlap.gather_product(
                grad, weight, ctx.axis, products, gradient=True, keep=needs_weight
            )
            grad = grad if gathered is None else gathered  # (b·s, h)
        elif needs_x:
            grad_x = products.input_gradient(grad, weight)
        elif ctx.sequence_parallel:
            grad = collectives.all_gather(grad, ctx.axis)
        grad_weight = products.weight_gradient(grad, x) if needs_weight else None
        return grad_x, grad_weight, None, None, None, deferred


class LinearOptions(Placement, total=False):
    """Further arguments of a column-parallel layer."""

    bias: bool
    sequence_parallel: bool
    products: Products
    initializer: Initializer | None


class ColumnParallelLinear(DeferrableLinear):
    """Y = X Wᵀ + b with W split by rows; several weights may be fused into one product ([gate; up]).

    Args:
        in_features: h.
        out_features: o, or the sizes of the fused sections by name, each split separately: a rank holds [gate_t; up_t] and its
            output is (b·s, gate/t + up/t).
        axis: tensor axis.
        bias: whether to add a bias, split like the rows.
        sequence_parallel: whether the input is (b·s/t, h).
        products: how matrix products are computed.
        initializer: of the weight, default N(0, 0.02²); biases start at zero.
        head_rows: of the weight's layout.
        replicas: of sections, by name: number of neighbouring ranks that hold the same shard; 1 by default.

    Raises:
        ValueError: the axis does not divide a size, or the input has the wrong width or dtype.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | Mapping[str, int],
        axis: Axis,
        *,
        bias: bool = False,
        sequence_parallel: bool = False,
        products: Products = EXACT,
        initializer: Initializer | None = None,
        head_rows: tuple[int, ...] = (),
        replicas: Mapping[str, int] | None = None,
        **placed: Unpack[Placement],
    ) -> None:
        super().__init__(axis, sequence_parallel, products)
        sizes = {"": out_features} if isinstance(out_features, int) else dict(out_features)
        copies = {name: (replicas or {}).get(name, 1) for name in sizes}
        for name, size in sizes.items():
            check_divisible(self, f"out_features{f'[{name}]' if name else ''}", size * copies[name], axis)
        rows = tuple(Section(name, (size, in_features), 0, copies[name]) for name, size in sizes.items())
        layout = Layout(rows, axis.size, initializer or Normal(0.02), head_rows=head_rows)
        self.weight = parameter(layout, **placed)
        if bias:
            entries = tuple(Section(name, (size,), 0, copies[name]) for name, size in sizes.items())
            self.bias = parameter(Layout(entries, axis.size, Constant(0.0)), **placed)

    def multiply(self, x: Tensor, weight: Tensor, output: Tensor | None) -> Tensor:
        options = (self.sequence_parallel, self.products, output)
        return ColumnLinear.apply(x, weight, self.bias, self.axis, *options)


class RowParallelLinear(DeferrableLinear):
    """Y = Σ Xi Wiᵀ + b with W split by columns; adds b once, after the reduction.

    Args:
        in_features: i; a rank's input is (b·s, i/t).
        out_features: h.
        axis: tensor axis.
        sequence_parallel: whether the output is (b·s/t, h).
        products: how matrix products are computed.

    Raises:
        ValueError: the axis does not divide in_features, or the input has the wrong width or dtype.
    """

    scatters = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        axis: Axis,
        *,
        bias: bool = False,
        sequence_parallel: bool = False,
        products: Products = EXACT,
        initializer: Initializer | None = None,
        **placed: Unpack[Placement],
    ) -> None:
        super().__init__(axis, sequence_parallel, products)
        check_divisible(self, "in_features", in_features, axis)
        columns = Section("", (out_features, in_features), 1)
        self.weight = parameter(Layout((columns,), axis.size, initializer or Normal(0.02)), **placed)
        if bias:
            partial_axes = ("tensor",) if self.sequence_parallel else ()
            layout = Layout((Section("", (out_features,), None),), axis.size, Constant(0.0), partial_axes)
            self.bias = parameter(layout, **placed)

    def multiply(self, x: Tensor, weight: Tensor, output: Tensor | None) -> Tensor:
        # Selective activation checkpointing saves the reduction's output, so the product's need not be.
        reduced = self.axis.size > 1 and self.axis.supports_reduction
        with recomputing_products() if reduced else nullcontext():
            y = RowLinear.apply(x, weight, self.axis, self.sequence_parallel, self.products, output)
        return y if self.bias is None else y + self.bias


class ReplicatedLinear(nn.Module):
    """Y = X Wᵀ with W replicated on all tensor ranks; X is (tokens, i).

    Args:
        out_features: o, or the sizes of the stacked sections by name.
        sequence_parallel: whether each rank has its own tokens; the weight's gradient is then a partial sum.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | Mapping[str, int],
        axis: Axis,
        *,
        sequence_parallel: bool = False,
        initializer: Initializer | None = None,
        **placed: Unpack[Placement],
    ) -> None:
        super().__init__()
        sizes = {"": out_features} if isinstance(out_features, int) else out_features
        sections = tuple(Section(name, (size, in_features), None) for name, size in sizes.items())
        partial_axes = ("tensor",) if sequence_parallel and axis.size > 1 else ()
        layout = Layout(sections, axis.size, initializer or Normal(0.02), partial_axes)
        self.weight = parameter(layout, **placed)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


class VocabParallelEmbedding(nn.Module):
    """Vocabulary-parallel token embedding: ranks look up the tokens of their rows and reduce the results.

    Args:
        vocabulary: v; if the axis does not divide it, the last shards are padded with unused rows.
        hidden: h.
        axis: tensor axis.
        sequence_parallel: whether the output is (b·s/t, h).
        partial_axes: mesh axes over which the weight's gradient is a partial sum (`Layout.partial_axes`).
    """

    first: Tensor  # index of this rank's first row

    def __init__(
        self,
        vocabulary: int,
        hidden: int,
        axis: Axis,
        *,
        sequence_parallel: bool = False,
        partial_axes: tuple[str, ...] = (),
        initializer: Initializer | None = None,
        **placed: Unpack[Placement],
    ) -> None:
        super().__init__()
        self.axis = axis
        self.sequence_parallel = sequence_parallel and axis.size > 1
        rows = Section("", (vocabulary, hidden), 0)
        layout = Layout((rows,), axis.size, initializer or Normal(0.02), partial_axes)
        self.weight = parameter(layout, **placed)
        # This rank's first row as a tensor: a Python number would give each rank its own graph.
        first = torch.tensor(axis.rank * layout.local_shape()[0], device=placed.get("device"))
        self.register_buffer("first", first, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """(b, s) token ids -> (b·s, h) or (b·s/t, h)."""
        tokens = tokens.flatten()  # (b·s)
        if self.axis.size == 1:
            return F.embedding(tokens, self.weight)
        rows = tokens - self.first
        local = (rows >= 0) & (rows < self.weight.shape[0])
        # (b·s, h), zero for other ranks' tokens
        x = F.embedding(rows.where(local, 0), self.weight) * local[:, None]
        return (collectives.scatter_reduce if self.sequence_parallel else collectives.reduce)(x, self.axis)


class Embedding(nn.Module):
    """Embedding with the full table on every rank, for small tables (learned positions).

    Args:
        rows: of the table.
        hidden: h.
        axis: tensor axis, over which the table is replicated.
        sequence_parallel: whether the output is (b·s/t, h); the table's gradient is then a partial sum.
    """

    def __init__(
        self,
        rows: int,
        hidden: int,
        axis: Axis,
        *,
        sequence_parallel: bool = False,
        initializer: Initializer | None = None,
        **placed: Unpack[Placement],
    ) -> None:
        super().__init__()
        self.axis = axis
        self.sequence_parallel = sequence_parallel and axis.size > 1
        partial_axes = ("tensor",) if self.sequence_parallel else ()
        table = Section("", (rows, hidden), None)
        layout = Layout((table,), axis.size, initializer or Normal(0.02), partial_axes)
        self.weight = parameter(layout, **placed)

    def forward(self, ids: Tensor) -> Tensor:
        """(b, s) ids -> (b·s, h) or (b·s/t, h)."""
        ids = ids.flatten()  # (b·s)
        ids = collectives.local_shard(ids, self.axis) if self.sequence_parallel else ids
        return F.embedding(ids, self.weight)


def check_divisible(layer: nn.Module, argument: str, size: int, axis: Axis) -> None:
    """Raise ValueError unless the axis divides the size."""
    if size % axis.size:
        name, degree = type(layer).__name__, axis.size
        nearest = sorted({size // degree * degree or degree, -(-size // degree) * degree})
        raise ValueError(
            f"{name}: {argument} = {size} is not divisible by {axis.name} = {degree}; "
            f"nearest valid: {', '.join(map(str, nearest))}"
        )
