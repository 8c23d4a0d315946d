"""Collectives over one axis of the mesh, wrapped once: differentiable pairs, and the exchanges that ring and ZeRO-1 use.

Built on the functional collectives of torch.distributed, which `torch.compile` traces. An axis of size 1 costs nothing.
Bytes that one rank sends for a tensor of B bytes over n ranks: all-gather of shards B(n-1)/n, reduce-scatter B(n-1)/n,
all-reduce 2B(n-1)/n.

gloo reduces slowly (2 MB over 2 ranks: 7.2 ms for its reduce-scatter, 0.8 ms for its all-to-all) and not in every type, so
where a backend does not reduce well (`Axis.reduces`) pieces are exchanged by all-to-all and summed here, in float32 and
in the order of the ranks: every rank gets the same bits. Its all-gathers, several at a time on a busy machine, corrupt
the heap (torch 2.13: one of 4 processes died within minutes, of exchanges none in 90,000 rounds), so they are exchanges too.

The differentiable pairs (Megatron-LM, arXiv 1909.08053; sequence parallelism, arXiv 2205.05198):

    copy            identity        | all-reduce
    reduce          all-reduce      | identity
    gather          all-gather      | reduce-scatter
    scatter_reduce  reduce-scatter  | all-gather
    split           own piece       | all-gather
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from parallel.mesh import Axis

_ops = torch.ops._c10d_functional


class Waited:
    """Seconds that this process has waited for others so far, outside of compiled graphs: what it did not work itself."""

    seconds = 0.0


waited = Waited()


def wait(tensor: Tensor) -> Tensor:
    """Wait for the result of a `start_*`."""
    if torch.compiler.is_compiling():
        return _ops.wait_tensor(tensor)
    begun = time.perf_counter()
    result = _ops.wait_tensor(tensor)
    waited.seconds += time.perf_counter() - begun
    return result


def after(x: Tensor, grad: Tensor) -> Tensor:
    """x (n, h), which a compiled graph has no earlier than `grad` (m, o).

    What depends on x alone a compiler does in forward, once, and keeps: a gather that is meant to be done again in backward, so
    that its result need not be kept, must depend on backward. So x comes out of a tensor that has a row of `grad` too.
    """
    if not torch.compiler.is_compiling():
        return x
    row = grad[:1, :1].expand(1, x.shape[1])  # (1, h)
    return torch.cat((row, x))[1:]  # (n, h)


def start_all_gather(x: Tensor, axis: Axis) -> Tensor:
    """(p, ...) on each of n ranks -> (n·p, ...), in the order of the ranks. The result may be read after `wait`."""
    if axis.reduces:
        return _ops.all_gather_into_tensor(x.contiguous(), axis.size, axis.name)
    return start_exchange(x.expand(axis.size, *x.shape).flatten(0, 1), axis)  # a copy for each rank


def start_all_gather_into(out: Tensor, axis: Axis) -> dist.Work:
    """Fill the flat `out` (n·p) with every rank's own piece of it, in place. It may be read after the result's `wait()`."""
    own = out.unflatten(0, (axis.size, -1))[axis.rank]
    if axis.reduces:
        return dist.all_gather_single(out, own, group=axis.group, async_op=True)
    return dist.all_to_all_single(out, own.repeat(axis.size), group=axis.group, async_op=True)


def start_exchange(x: Tensor, axis: Axis) -> Tensor:
    """All-to-all of equal pieces: (n·p, ...) -> (n·p, ...), piece i going to rank i. The result may be read after `wait`."""
    piece = [x.shape[0] // axis.size] * axis.size
    return _ops.all_to_all_single(x.contiguous(), piece, piece, axis.name)


def start_shift(x: Tensor, axis: Axis, by: int = 1) -> Tensor:
    """Send x to the rank `by` places on around the ring, receive from the one as far behind. Readable after `wait`."""
    flat = x.contiguous().flatten()
    count = flat.numel()
    send, receive = [0] * axis.size, [0] * axis.size
    send[(axis.rank + by) % axis.size] = count
    receive[(axis.rank - by) % axis.size] = count
    return _ops.all_to_all_single(flat, receive, send, axis.name).view(x.shape)


def _sum_pieces(exchanged: Tensor, axis: Axis, dtype: torch.dtype) -> Tensor:
    """(n·p, ...) of what each rank sent here -> (p, ...), summed in float32 (or wider) in the order of the ranks."""
    pieces = exchanged.unflatten(0, (axis.size, -1))  # (n, p, ...)
    if axis.size == 2 and exchanged.dtype == dtype:
        return pieces[0] + pieces[1]  # one addition rounds once, in any type
    wide = torch.promote_types(exchanged.dtype, torch.float32)
    return pieces.sum(0, dtype=wide).to(dtype)


class StartedReduce:
    """A reduce-scatter under way; `wait()` gives the sum of this rank's piece."""

    def __init__(self, x: Tensor, axis: Axis) -> None:
        self.axis, self.dtype = axis, x.dtype
        if axis.reduces:
            self.pending = _ops.reduce_scatter_tensor(x.contiguous(), "sum", axis.size, axis.name)
        else:
            self.pending = start_exchange(x, axis)

    def wait(self) -> Tensor:
        result = wait(self.pending)
        return result if self.axis.reduces else _sum_pieces(result, self.axis, self.dtype)


def start_reduce_scatter(x: Tensor, axis: Axis) -> StartedReduce:
    """Begin summing (n·p, ...) over the axis, each rank keeping its piece (p, ...)."""
    return StartedReduce(x, axis)


class StartedAllReduce:
    """An all-reduce under way; `wait()` gives the sum."""

    def __init__(self, x: Tensor, axis: Axis) -> None:
        self.axis, self.shape = axis, x.shape
        self.native = axis.reduces
        if self.native:
            self.pending = _ops.all_reduce(x.contiguous(), "sum", axis.name)
            return
        # Small or indivisible tensors go whole to everyone; large ones as reduce-scatter and all-gather.
        self.whole = x.numel() % axis.size != 0 or x.numel() * x.element_size() <= 1 << 15 or axis.size == 2
        if self.whole:
            self.dtype = x.dtype
            self.pending = start_all_gather(x.reshape(1, -1), axis)
        else:
            self.scatter = start_reduce_scatter(x.reshape(axis.size, -1), axis)

    def wait(self) -> Tensor:
        if self.native:
            return wait(self.pending)
        if self.whole:
            return _sum_pieces(wait(self.pending), self.axis, self.dtype).view(self.shape)
        return wait(start_all_gather(self.scatter.wait(), self.axis)).view(self.shape)


def start_all_reduce(x: Tensor, axis: Axis) -> StartedAllReduce:
    """Begin summing x over the axis."""
    return StartedAllReduce(x, axis)


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """Sum over the axis, the same bits on every rank."""
    return x if axis.size == 1 else StartedAllReduce(x, axis).wait()


def all_reduce_max(x: Tensor, axis: Axis) -> Tensor:
    """Largest value over the axis, element by element."""
    return x if axis.size == 1 else wait(_ops.all_reduce(x, "max", axis.name))


def all_gather(x: Tensor, axis: Axis) -> Tensor:
    """(p, ...) -> (n·p, ...)."""
    return x if axis.size == 1 else wait(start_all_gather(x, axis))


def reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    """(n·p, ...) -> (p, ...), summed.

    Raises:
        ValueError: the first dim does not divide by the axis.
    """
    if axis.size == 1:
        return x
    _divides("reduce_scatter", x, axis)
    return StartedReduce(x, axis).wait()


def own_piece(x: Tensor, axis: Axis) -> Tensor:
    """This rank's piece (p, ...) of (n·p, ...), which is equal on all ranks.

    Taken by an exchange with oneself rather than by an index, so that no rank number enters a compiled graph.
    """
    if axis.size == 1:
        return x
    _divides("split", x, axis)
    if torch.compiler.is_compiling():
        return wait(start_exchange(x, axis)).unflatten(0, (axis.size, -1))[0]
    return x.unflatten(0, (axis.size, -1))[axis.rank]


def _divides(what: str, x: Tensor, axis: Axis) -> None:
    if x.shape[0] % axis.size:
        raise ValueError(f"{what}: dim 0 of size {x.shape[0]} does not divide over {axis.name} = {axis.size}")


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad, ctx.axis), None


class _Reduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return all_reduce(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return all_gather(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(grad, ctx.axis), None


class _ScatterReduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return reduce_scatter(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_gather(grad, ctx.axis), None


class _Split(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return own_piece(x, axis).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_gather(grad, ctx.axis), None


def copy(x: Tensor, axis: Axis) -> Tensor:
    """Identity; the gradient is summed over the axis."""
    return x if axis.size == 1 else _Copy.apply(x, axis)


def reduce(x: Tensor, axis: Axis) -> Tensor:
    """Sum over the axis; the gradient passes through."""
    return x if axis.size == 1 else _Reduce.apply(x, axis)


def gather(x: Tensor, axis: Axis) -> Tensor:
    """(p, ...) -> (n·p, ...); the gradient is summed and scattered."""
    return x if axis.size == 1 else _Gather.apply(x, axis)


def scatter_reduce(x: Tensor, axis: Axis) -> Tensor:
    """(n·p, ...) -> (p, ...) summed; the gradient is gathered."""
    return x if axis.size == 1 else _ScatterReduce.apply(x, axis)


def split(x: Tensor, axis: Axis) -> Tensor:
    """(n·p, ...), equal on all ranks -> own piece (p, ...); the gradient is gathered."""
    return x if axis.size == 1 else _Split.apply(x, axis)
