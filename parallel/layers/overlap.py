"""Overlap of matrix products with the collectives of sequence parallelism.

In chunks of tokens, where the collective communicates the product's own data:

    gather_product     Y = all-gather(X) Wᵀ        chunk i + 1 is gathered while chunk i is multiplied
    scatter_product    Y = reduce-scatter(X Wᵀ)    chunk i is reduced while chunk i + 1 is multiplied

Each row of the product depends on the same row of X only. A chunk consists of the same rows of each rank's shard, so that its
collective is an ordinary one of 1/c of the size, and every element of Y is the same sum as without chunks. With c chunks, 1/c of
the shorter of product and collective stays exposed (arXiv 2105.05720). The cost is a copy of each chunk and the memory of two.

Whole, beside another product (`gather_beside`, `scatter_beside`), in graphs with chunks.

All are opaque operators that take the axis's registered name: inductor moves collectives of a graph behind the products that they
should overlap with. Devices that support no opaque operators (`Axis.operators`) have the same calls in their graphs. The host
never waits: `wait` makes the device's compute stream wait for a collective.

FP8: factors are quantized before the operator, where a compiler fuses it, and W once for all chunks. X is gathered in FP8, half
of the bytes, with the scales that the gathered X would have. If backward needs the gathered X besides the product, which
quantizes it along the other dim, it is gathered whole, in the tensors' dtype.

`Axis.chunks` is the number of chunks, or None to derive it from the sizes with the constants below, which are estimates for
NVLink, not measured.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from parallel import collectives, mesh
from parallel.activation_checkpointing import always_save
from parallel.layers.products import EXACT, Factor, Products, named
from parallel.mesh import Axis
from parallel.torch_internals import custom_op

MAX_CHUNKS = 4
MIN_ROWS = 2048  # of a chunk's product, so that its tiles fill the device
MIN_BYTES = 8 << 20  # of a chunk's collective, so that latency is a small part of its duration


def count_chunks(rows: int, row_bytes: int, axis: Axis) -> int:
    """Number of chunks of a product of `rows` gathered rows; the collective moves `row_bytes` for each.

    Returns:
        a divisor of each rank's number of rows.
    """
    most = axis.chunks
    if most is None:
        most = min(MAX_CHUNKS, rows // MIN_ROWS, rows * row_bytes // MIN_BYTES)
    local = rows // axis.size
    return next((count for count in range(most, 1, -1) if local % count == 0), 1)


def gather_product(
    x: Tensor,
    weight: Tensor,
    axis: Axis,
    products: Products,
    *,
    bias: Tensor | None = None,
    gradient: bool = False,
    keep: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """X Wᵀ + bias for the X (n·p, k) of which each rank holds (p, k); and X itself if `keep`.

    Args:
        weight: (m, k).
        gradient: X is a gradient and the product X W, with W (k, m).
    """
    rows, row_bytes = len(x) * axis.size, x.shape[1] * products.element_size(x)
    chunks = 1 if keep and products is not EXACT else count_chunks(rows, row_bytes, axis)
    if chunks == 1:
        gathered = collectives.wait(collectives.start_all_gather(x, axis))
        if gradient:
            y = products.input_gradient(gathered, weight)
        else:
            y = products.forward(gathered, weight, bias)
        return y, gathered if keep else None
    a = products.left(x, gradient, axis)
    b = products.right(weight.t() if gradient else weight)
    settings: tuple[Any, ...] = chunks, products.name, x.dtype, gradient, keep
    if axis.operators:
        y, kept = _gather_product(*a, *b, bias, *_named(axis), *settings)
        return y, kept if keep else None
    return _gather_in_chunks(a, b, bias, axis, *settings)


def scatter_product(
    x: Tensor, weight: Tensor, axis: Axis, products: Products, *, gradient: bool = False
) -> Tensor:
    """This rank's rows (p, m) of the sum over the axis of each rank's X Wᵀ, with X (n·p, k).

    Args:
        weight: (m, k).
        gradient: X is a gradient and the product X W, with W (k, m).

    Raises:
        ValueError: the axis does not divide dim 0.
    """
    collectives.check_divisible("reduce_scatter", x, axis)
    width = weight.shape[1] if gradient else len(weight)
    chunks = count_chunks(len(x), width * x.element_size(), axis)
    if chunks == 1:
        product = products.input_gradient if gradient else products.forward
        return collectives.PendingReduceScatter(product(x, weight), axis).wait()
    a, b = products.left(x, gradient), products.right(weight.t() if gradient else weight)
    settings: tuple[Any, ...] = chunks, products.name, x.dtype, gradient
    if axis.operators:
        return _scatter_product(*a, *b, *_named(axis), *settings)
    return _scatter_in_chunks(a, b, axis, *settings)


def uses_operators(x: Tensor, axis: Axis) -> bool:
    """Whether a graph gathers x (p, k) in an operator: products of these sizes are divided into chunks."""
    divided = count_chunks(len(x) * axis.size, x.shape[1] * x.element_size(), axis) > 1
    return torch.compiler.is_compiling() and axis.operators and divided


def gather_beside(
    x: Tensor, axis: Axis, grad: Tensor, weight: Tensor, products: Products
) -> tuple[Tensor, Tensor]:
    """X (n·p, k), of which each rank holds (p, k), and `products.input_gradient(grad, weight)`."""
    a, b = products.left(grad, True), products.right(weight.t())
    return _gather_beside(x, *a, *b, *_named(axis), products.name, grad.dtype)


def scatter_beside(
    x: Tensor, axis: Axis, grad: Tensor, inputs: Tensor, products: Products
) -> tuple[Tensor, Tensor]:
    """This rank's rows (p, k) of the sum of each rank's X, and `products.weight_gradient(grad, inputs)`."""
    a, b = products.left(grad.t(), True), products.right(inputs.t())
    return _scatter_beside(x, *a, *b, *_named(axis), products.name, grad.dtype)


def scratch_bytes(a: Tensor, b: Tensor, size: int, chunks: int, dtype: torch.dtype, scatters: bool) -> int:
    """Bytes that a product in chunks allocates besides its results.

    Args:
        a, b: arguments of the operator.
        scatters: whether the product is scattered; otherwise `a` is gathered.
    """
    rows = len(a) if scatters else len(a) * size
    chunk, product = rows * a.shape[1] * a.element_size() // chunks, rows * len(b) * dtype.itemsize
    if scatters:  # a chunk, every chunk's product until it is reduced, and the reduced chunks
        return chunk + product + product // size
    return 2 * chunk + product // chunks  # two chunks, the next one under way, and the product of one


def copied_bytes(a: Tensor, b: Tensor, size: int, dtype: torch.dtype, scatters: bool, keep: bool) -> int:
    """Bytes that copies of a product's chunks read and write; arguments as for `scratch_bytes`."""
    rows = len(a) if scatters else len(a) * size
    left, product = rows * a.shape[1] * a.element_size(), rows * len(b) * dtype.itemsize
    return 2 * (left + product // size if scatters else product + keep * left)


def _named(axis: Axis) -> tuple[str, int, bool]:
    """An axis as arguments of operators, without a rank."""
    return axis.name, axis.size, axis.supports_reduction


def _axis(name: str, size: int, supports_reduction: bool) -> Axis:
    return replace(mesh.registered_axis(name, size), supports_reduction=supports_reduction)


def _gather_in_chunks(
    a: Factor,
    b: Factor,
    bias: Tensor | None,
    axis: Axis,
    chunks: int,
    products: str,
    dtype: torch.dtype,
    gradient: bool,
    keep: bool,
) -> tuple[Tensor, Tensor | None]:
    by, (values, scale) = named(products), a
    parts = values.chunk(chunks)  # (p/c, k) each
    if scale is not None and by.scales_rows:
        pending_scale = collectives.start_all_gather(scale, axis)
    y: Any = None
    kept: Tensor | None = None
    following = _start_gather(parts[0], axis)
    if scale is not None and by.scales_rows:
        scale = collectives.wait(pending_scale).unflatten(0, (axis.size, chunks, -1))  # (n, c, p/c, ...)
    for i in range(chunks):
        pending = following
        if i + 1 < chunks:
            following = _start_gather(parts[i + 1], axis)
        gathered = collectives.wait(pending).view(values.dtype)  # (n·p/c, k)
        chunk = gathered, _chunk(scale, i) if by.scales_rows else scale
        y = _write_chunk(y, by.multiply_factors(chunk, b, dtype, bias, gradient), i, chunks, axis)
        kept = _write_chunk(kept, gathered, i, chunks, axis) if keep else None
    return y.flatten(0, 2), None if kept is None else kept.flatten(0, 2)


def _scatter_in_chunks(
    a: Factor, b: Factor, axis: Axis, chunks: int, products: str, dtype: torch.dtype, gradient: bool
) -> Tensor:
    by = named(products)
    values, scale = a[0].unflatten(0, (axis.size, chunks, -1)), a[1]  # (n, c, p/c, k)
    if scale is not None and by.scales_rows:
        scale = scale.unflatten(0, (axis.size, chunks, -1))
    pending = []
    for i in range(chunks):
        chunk = values[:, i].flatten(0, 1), _chunk(scale, i) if by.scales_rows else scale
        product = by.multiply_factors(chunk, b, dtype, None, gradient)
        pending.append(collectives.PendingReduceScatter(product, axis))
    return torch.cat([each.wait() for each in pending])


def _start_gather(x: Tensor, axis: Axis) -> Tensor:
    """Start gathering x, as bytes if it is in FP8, which not every backend sends."""
    return collectives.start_all_gather(x.view(torch.uint8) if x.element_size() == 1 else x, axis)


def _chunk(scale: Tensor | None, i: int) -> Tensor | None:
    """Scales of chunk i (n·p/c, ...), of those (n, c, p/c, ...) of all."""
    return None if scale is None else scale[:, i].flatten(0, 1)


def _write_chunk(result: Tensor | None, chunk: Tensor, i: int, chunks: int, axis: Axis) -> Tensor:
    """Copy chunk i (n·p/c, m) to each rank's rows in `result` (n, c, p/c, m), allocated by the first call."""
    chunk = chunk.unflatten(0, (axis.size, -1))  # (n, p/c, m)
    if result is None:
        result = chunk.new_empty(axis.size, chunks, *chunk.shape[1:])
    result[:, i] = chunk
    return result


# Arguments of all operators: two factors and their scales, and `_named`.
_FACTORS = "Tensor a, Tensor? a_scale, Tensor b, Tensor? b_scale"
_AXIS = "str axis, SymInt size, bool supports_reduction"
_CHUNKS = "SymInt chunks, str products, ScalarType dtype, bool gradient"
_BESIDE = f"(Tensor x, {_FACTORS}, {_AXIS}, str products, ScalarType dtype) -> (Tensor, Tensor)"


@custom_op(
    "trainshed::gather_product",
    f"({_FACTORS}, Tensor? bias, {_AXIS}, {_CHUNKS}, bool keep) -> (Tensor, Tensor)",
)
def _gather_product(*inputs: Any) -> tuple[Tensor, Tensor]:
    """The product (n·p, m), and the gathered `a` (n·p, k), empty unless `keep`."""
    a, b, bias = inputs[:2], inputs[2:4], inputs[4]
    y, kept = _gather_in_chunks(a, b, bias, _axis(*inputs[5:8]), *inputs[8:])
    return y, inputs[0].new_empty(0) if kept is None else kept


@_gather_product.register_fake
def _(
    a: Tensor, a_scale: Any, b: Tensor, b_scale: Any, bias: Any, axis: Any, size: int, *more: Any
) -> tuple[Tensor, Tensor]:
    *_, dtype, _, keep = more
    rows = len(a) * size
    return a.new_empty(rows, len(b), dtype=dtype), a.new_empty(*((rows, a.shape[1]) if keep else (0,)))


@custom_op("trainshed::scatter_product", f"({_FACTORS}, {_AXIS}, {_CHUNKS}) -> Tensor")
def _scatter_product(*inputs: Any) -> Tensor:
    return _scatter_in_chunks(inputs[:2], inputs[2:4], _axis(*inputs[4:7]), *inputs[7:])


@_scatter_product.register_fake
def _(a: Tensor, a_scale: Any, b: Tensor, b_scale: Any, axis: Any, size: int, *more: Any) -> Tensor:
    *_, dtype, _ = more
    return a.new_empty(len(a) // size, len(b), dtype=dtype)


@custom_op("trainshed::gather_beside_product", _BESIDE)
def _gather_beside(x: Tensor, *inputs: Any) -> tuple[Tensor, Tensor]:
    pending = collectives.start_all_gather(x, _axis(*inputs[4:7]))
    product = _beside(*inputs)
    return collectives.wait(pending), product


@_gather_beside.register_fake
def _(x: Tensor, *inputs: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(len(x) * inputs[5], x.shape[1]), _beside_like(*inputs)


@custom_op("trainshed::scatter_beside_product", _BESIDE)
def _scatter_beside(x: Tensor, *inputs: Any) -> tuple[Tensor, Tensor]:
    pending = collectives.PendingReduceScatter(x, _axis(*inputs[4:7]))
    product = _beside(*inputs)
    return pending.wait(), product


@_scatter_beside.register_fake
def _(x: Tensor, *inputs: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(len(x) // inputs[5], x.shape[1]), _beside_like(*inputs)


def _beside(*inputs: Any) -> Tensor:
    """The product beside which x is gathered or scattered; arguments as in `_BESIDE`."""
    *_, products, dtype = inputs
    return named(products).multiply_factors(inputs[:2], inputs[2:4], dtype, None, True)


def _beside_like(a: Tensor, _: Any, b: Tensor, *more: Any) -> Tensor:
    return a.new_empty(len(a), len(b), dtype=more[-1])


_ours = torch.ops.trainshed
always_save(_ours.gather_product.default, _ours.scatter_product.default)
