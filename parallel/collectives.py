"""All communication: collectives over one mesh axis, asynchronous, blocking and differentiable.

Built on torch's functional collectives, which `torch.compile` traces. An axis of size 1 costs nothing. Bytes that a rank sends
for a tensor of B bytes over n ranks: all-gather of shards B(n-1)/n, reduce-scatter B(n-1)/n, all-reduce 2B(n-1)/n.

Backends without fast reductions (`Axis.supports_reduction` is False: gloo takes 7.2 ms for a reduce-scatter of 2 MB over 2
ranks, 0.8 ms for an all-to-all, and cannot reduce every dtype) exchange shards by all-to-all and sum them here, in float32 and
rank order, so every rank gets the same bits. In eager mode, two ranks send each other what is missing, without copies to
themselves. All-gathers use all-to-all there too: several concurrent gloo all-gathers on a busy machine corrupt the heap (torch
2.13: one of 4 processes died within minutes; all-to-all survived 90,000 rounds).

Differentiable pairs, forward | backward (Megatron-LM, arXiv 1909.08053; sequence parallelism, arXiv 2205.05198):

    copy            identity                              | all-reduce
    reduce          all-reduce                            | identity
    gather          all-gather (p, ...) -> (n·p, ...)     | reduce-scatter
    scatter_reduce  reduce-scatter (n·p, ...) -> (p, ...) | all-gather
    exchange        all-to-all (n·p, ...) -> (n·p, ...)   | all-to-all
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from parallel.host_products import runs_on_host
from parallel.mesh import Axis
from parallel.torch_internals import (
    all_gather_into_tensor,
    all_to_all_single,
    reduce_scatter_tensor,
    wait_tensor,
)
from parallel.torch_internals import all_reduce as functional_all_reduce


class WaitTime:
    """Seconds this process has blocked on collectives outside compiled graphs."""

    seconds = 0.0


wait_time = WaitTime()


def wait(tensor: Tensor) -> Tensor:
    """Wait for the result of a `start_*` function."""
    if torch.compiler.is_compiling():
        return wait_tensor(tensor)
    begun = time.perf_counter()
    result = wait_tensor(tensor)
    wait_time.seconds += time.perf_counter() - begun
    return result


def wait_work(work: dist.Work) -> None:
    """Wait for the result of a `start_*_into` function."""
    begun = time.perf_counter()
    work.wait()
    wait_time.seconds += time.perf_counter() - begun


def depend_on_gradient(x: Tensor, grad: Tensor) -> Tensor:
    """Make x (n, h) depend on `grad` (m, o), so that a compiler cannot move its uses into forward.

    Compilers hoist what depends only on forward tensors into forward and save the result. An all-gather that is repeated in
    backward to save memory must therefore depend on a backward tensor: x is sliced out of a concatenation with a row of `grad`.
    """
    if not torch.compiler.is_compiling():
        return x
    row = grad[:1, :1].expand(1, x.shape[1])  # (1, h)
    return torch.cat((row, x))[1:]  # (n, h)


def start_all_gather(x: Tensor, axis: Axis) -> Tensor:
    """Gather (p, ...) from each of n ranks -> (n·p, ...) in rank order; read the result after `wait`."""
    if axis.supports_reduction:
        return all_gather_into_tensor(x.contiguous(), axis.size, axis.name)
    return start_all_to_all(x.expand(axis.size, *x.shape).flatten(0, 1), axis)  # a copy for each rank


def start_all_gather_into(out: Tensor, axis: Axis) -> dist.Work:
    """All-gather in place in the flat `out` (n·p), which holds the local shard; read after `Work.wait()`."""
    shard = out.unflatten(0, (axis.size, -1))[axis.rank]
    if axis.supports_reduction:
        return dist.all_gather_single(out, shard, group=axis.group, async_op=True)
    if axis.size == 2:  # without copies
        other = out.unflatten(0, (2, -1))[1 - axis.rank]
        counts = [len(other) * (rank != axis.rank) for rank in range(2)]
        return dist.all_to_all_single(other, shard, counts, counts, group=axis.group, async_op=True)
    return dist.all_to_all_single(out, shard.repeat(axis.size), group=axis.group, async_op=True)


def start_all_to_all(x: Tensor, axis: Axis) -> Tensor:
    """Send shard i of x (n·p, ...) to rank i; read what each rank sent (n·p, ...) after `wait`."""
    sizes = [x.shape[0] // axis.size] * axis.size
    return all_to_all_single(x.contiguous(), sizes, sizes, axis.name)


def start_uneven_all_to_all(x: Tensor, send: list[int], receive: list[int], axis: Axis) -> Tensor:
    """Send the next `send[i]` rows of x to rank i; read the `receive[i]` rows from each after `wait`."""
    return all_to_all_single(x.contiguous(), receive, send, axis.name)


def start_ring_send_recv(x: Tensor, axis: Axis, by: int = 1) -> Tensor:
    """Send x `by` ranks ahead on the ring and receive from `by` ranks behind; read it after `wait`."""
    flat = x.contiguous().flatten()
    count = flat.numel()
    send, receive = [0] * axis.size, [0] * axis.size
    send[(axis.rank + by) % axis.size] = count
    receive[(axis.rank - by) % axis.size] = count
    return all_to_all_single(flat, receive, send, axis.name).view(x.shape)


def _sum_shards(received: Tensor, axis: Axis, dtype: torch.dtype) -> Tensor:
    """Sum what each rank sent here, (n·p, ...) -> (p, ...), in float32 or wider and in rank order."""
    shards = received.unflatten(0, (axis.size, -1))  # (n, p, ...)
    if axis.size == 2 and received.dtype == dtype:
        return shards[0] + shards[1]  # a single addition rounds once in any dtype
    wide = torch.promote_types(received.dtype, torch.float32)
    return shards.sum(0, dtype=wide).to(dtype)


def _swaps(x: Tensor, axis: Axis) -> bool:
    """Whether ranks send each other their summands only; not in graphs, which have no rank number."""
    return axis.size == 2 and runs_on_host(x)


class PendingReduceScatter:
    """A reduce-scatter in progress; `wait()` returns this rank's shard of the sum.

    Args:
        out: this rank's shard of the flat x, to reduce in place; the other shards keep this rank's values.
    """

    def __init__(self, x: Tensor, axis: Axis, out: Tensor | None = None) -> None:
        self.axis, self.dtype, self.out = axis, x.dtype, out
        self.own: Tensor | None = None  # this rank's summand, if the other rank's is all that arrives
        if out is not None:
            self.work = dist.reduce_scatter_single(out, x, group=axis.group, async_op=True)
        elif axis.supports_reduction:
            self.pending = reduce_scatter_tensor(x.contiguous(), "sum", axis.size, axis.name)
        elif _swaps(x, axis):
            shards = x.unflatten(0, (2, -1))
            self.own = shards[axis.rank].detach()
            self.pending = start_ring_send_recv(shards[1 - axis.rank], axis)
        else:
            self.pending = start_all_to_all(x, axis)

    def wait(self, memory: Tensor | None = None) -> Tensor:
        """This rank's shard; a sum computed here may be written to `memory`, which may be the shard of x."""
        if self.out is not None:
            wait_work(self.work)
            return self.out
        result = wait(self.pending)
        if self.own is not None:
            return torch.add(self.own, result, out=memory)
        return result if self.axis.supports_reduction else _sum_shards(result, self.axis, self.dtype)


class PendingAllReduce:
    """An all-reduce in progress; `wait()` returns the sum."""

    def __init__(self, x: Tensor, axis: Axis) -> None:
        self.axis, self.shape = axis, x.shape
        self.native, self.own = axis.supports_reduction, None
        if self.native:
            self.pending = functional_all_reduce(x.contiguous(), "sum", axis.name)
            return
        if _swaps(x, axis):
            self.own, self.pending = x.detach(), start_ring_send_recv(x, axis)
            return
        # Gather small or indivisible tensors and sum them locally; reduce-scatter and all-gather large ones.
        self.gathers = x.numel() % axis.size != 0 or x.numel() * x.element_size() <= 1 << 15 or axis.size == 2
        if self.gathers:
            self.dtype = x.dtype
            self.pending = start_all_gather(x.reshape(1, -1), axis)
        else:
            self.scatter = PendingReduceScatter(x.reshape(axis.size, -1), axis)

    def wait(self) -> Tensor:
        if self.native:
            return wait(self.pending)
        if self.own is not None:
            return self.own + wait(self.pending)
        if self.gathers:
            return _sum_shards(wait(self.pending), self.axis, self.dtype).view(self.shape)
        return wait(start_all_gather(self.scatter.wait(), self.axis)).view(self.shape)


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """Sum over the axis, with the same bits on every rank."""
    return x if axis.size == 1 else PendingAllReduce(x, axis).wait()


def all_reduce_max(x: Tensor, axis: Axis) -> Tensor:
    """Elementwise maximum over the axis."""
    return x if axis.size == 1 else wait(functional_all_reduce(x, "max", axis.name))


def all_gather(x: Tensor, axis: Axis) -> Tensor:
    """(p, ...) -> (n·p, ...)."""
    return x if axis.size == 1 else wait(start_all_gather(x, axis))


def reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    """(n·p, ...) -> (p, ...), summed. Raises ValueError: the axis does not divide dim 0."""
    if axis.size == 1:
        return x
    check_divisible("reduce_scatter", x, axis)
    return PendingReduceScatter(x, axis).wait()


def local_shard(x: Tensor, axis: Axis) -> Tensor:
    """This rank's shard (p, ...) of x (n·p, ...), which is equal on all ranks.

    Compiled graphs take it by an all-to-all rather than by an index, so that they contain no rank number.

    Raises:
        ValueError: the axis does not divide dim 0.
    """
    if axis.size == 1:
        return x
    check_divisible("local_shard", x, axis)
    if torch.compiler.is_compiling():
        return wait(start_all_to_all(x, axis)).unflatten(0, (axis.size, -1))[0]
    return x.unflatten(0, (axis.size, -1))[axis.rank]


def check_divisible(function: str, x: Tensor, axis: Axis) -> None:
    """Raise ValueError, naming the calling function, unless the axis divides dim 0."""
    if x.shape[0] % axis.size:
        raise ValueError(
            f"{function}: dim 0 of size {x.shape[0]} is not divisible by {axis.name} = {axis.size}"
        )


Collective = Callable[[Tensor, Axis], Tensor]


def differentiable(forward: Collective, backward: Collective) -> Collective:
    """A collective whose gradient is another collective; the identity on an axis of size 1."""

    class Conjugate(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
            ctx.axis = axis
            return forward(x, axis)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            return backward(grad, ctx.axis), None

    return lambda x, axis: x if axis.size == 1 else Conjugate.apply(x, axis)


def all_to_all(x: Tensor, axis: Axis) -> Tensor:
    """Exchange shards: send shard i of x to rank i, and concatenate the shards that all ranks sent here.

    Raises:
        ValueError: the first dim is not a multiple of the number of ranks.

    Shapes:
        x (n·p, ...) -> (n·p, ...), on n ranks.
    """
    if axis.size == 1:
        return x
    check_divisible("all_to_all", x, axis)
    return wait(start_all_to_all(x, axis))


# The pairs of the module docstring.
copy = differentiable(lambda x, axis: x.view_as(x), all_reduce)
reduce = differentiable(all_reduce, lambda grad, axis: grad)
gather = differentiable(all_gather, reduce_scatter)
scatter_reduce = differentiable(reduce_scatter, all_gather)
exchange = differentiable(all_to_all, all_to_all)
