"""Process group of the emulated device: accepts only its tensors, and has gloo work on their memory.

The result of a collective is garbage until it is waited for, and the inputs must not change before. All-to-alls must be even,
apart from empty messages: a ring's send/recv is one with a single message each way. Reductions are in floating point.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work

from tests.emulation.device import TYPE, fill_garbage, host_alias, on_device
from tests.emulation.usage import Rejected, call_site, record_use

Tensors = Tensor | Sequence["Tensors"]
# The arguments of each collective that are results; an argument in both roles is overwritten.
RESULTS = {"recv": (0,), "send": (), "allreduce": (0,), "broadcast": (0,), "alltoall_base": (0,)}
REDUCTIONS = "allreduce", "_reduce_scatter_base"
RESULTS |= {"_allgather_base": (0,), "_reduce_scatter_base": (0,), "allgather": (0,)}


groups: list[Group] = []  # all that were made


class Pending(Work):
    """A collective under way."""

    def __init__(
        self, work: Work, results: list[tuple[Tensor, Tensor]], inputs: list[Tensor], what: str
    ) -> None:
        super().__init__()
        self._work, self._results, self._what = work, results, what
        self._inputs = [(x, x.clone()) for x in inputs]

    def wait(self, timeout: object = None) -> bool:
        if self._work is None:
            return True
        self._work.wait()
        self._work = None
        for x, given in self._inputs:
            if not torch.equal(x.view(torch.uint8), given.view(torch.uint8)):
                raise Rejected(f"{self._what}: an input was changed before the collective was waited for")
        for result, received in self._results:
            result.copy_(received)
        return True

    def is_completed(self) -> bool:
        return self._work is None or self._work.is_completed()

    def is_success(self) -> bool:
        return True

    synchronize = wait


uneven = False  # whether all-to-alls may be uneven


class Group(dist.ProcessGroup):
    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._name = ""
        self.timeout, self.used = timeout, False
        groups.append(self)

    _device_types = property(lambda self: [torch.device(TYPE)])
    group_name = property(lambda self: self._name)

    def getBackendName(self) -> str:
        return TYPE

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def abort(self) -> None:
        self._gloo.abort()

    def shutdown(self) -> None:
        self._gloo.shutdown()

    def _run(self, name: str, arguments: tuple[Tensors, ...], *rest: Any) -> Work:
        record_use()
        self.used = True
        what = f"{name} from {call_site()}"
        given = [_hosts(x, what) for x in arguments]
        if name in REDUCTIONS and not all(x.is_floating_point() for each in given for x in _leaves(each)):
            raise Rejected(f"{what}: a reduction of integers")
        # gloo works on copies of the results, which the memory of the device gets when it is waited for.
        used = [_map(torch.clone, x) if i in RESULTS[name] else x for i, x in enumerate(given)]
        results, inputs = [], []
        for i, (real, copied) in enumerate(zip(given, used, strict=True)):
            if i in RESULTS[name]:
                results += zip(_leaves(real), _leaves(copied), strict=True)
            else:
                inputs += _leaves(real)
        memory = [x for x, _ in results]
        shared = [x for x in inputs if any(_overlap(x, y) for y in memory)]
        # Inputs inside a result (an all-gather in place) must reach gloo as they are.
        replaced = {id(x): x.clone() for x in shared}
        used = [_map(lambda x: replaced.get(id(x), x), x) for x in used]
        for x in memory:
            fill_garbage(x)
        for x in shared:
            x.copy_(replaced[id(x)])
        work = getattr(self._gloo, name)(*used, *rest)
        if name == "_allgather_base":
            work.wait()  # gloo of torch 2.13 corrupts the heap if it runs several at a time
        return Pending(work, results, [x for x in inputs if not any(x is y for y in shared)], what)

    def barrier(self, opts: Any = None) -> Work:
        return self._gloo.barrier(dist.BarrierOptions())

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        return self._run("allreduce", (tensors,), opts or dist.AllreduceOptions())

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Work:
        return self._run("broadcast", (tensors,), opts)

    def allgather(self, outs: list[list[Tensor]], ins: list[Tensor], opts: Any = None) -> Work:
        return self._run("allgather", (outs, ins), opts or dist.AllgatherOptions())

    def _allgather_base(self, out: Tensor, own: Tensor, opts: Any = None) -> Work:
        return self._run("_allgather_base", (out, own), opts or dist.AllgatherOptions())

    def _reduce_scatter_base(self, out: Tensor, own: Tensor, opts: Any = None) -> Work:
        return self._run("_reduce_scatter_base", (out, own), opts or dist.ReduceScatterOptions())

    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base

    def allgather_into_tensor_coalesced(
        self, outs: list[Tensor], ins: list[Tensor], opts: Any = None
    ) -> Work:
        return [self._allgather_base(*pair, opts) for pair in zip(outs, ins, strict=True)][-1]

    def reduce_scatter_tensor_coalesced(
        self, outs: list[Tensor], ins: list[Tensor], opts: Any = None
    ) -> Work:
        return [self._reduce_scatter_base(*pair, opts) for pair in zip(outs, ins, strict=True)][-1]

    def alltoall_base(
        self, out: Tensor, own: Tensor, sizes: list[int], own_sizes: list[int], opts: Any = None
    ) -> Work:
        if not uneven and len({*sizes, *own_sizes} - {0}) > 1:
            raise Rejected(f"alltoall_base from {call_site()}: uneven: {sizes}, {own_sizes}")
        return self._run("alltoall_base", (out, own), sizes, own_sizes, opts or dist.AllToAllOptions())

    all_to_all_single = alltoall_base

    def send(self, tensors: list[Tensor], rank: int, tag: int = 0) -> Work:
        return self._run("send", (tensors,), rank, tag)

    def recv(self, tensors: list[Tensor], rank: int, tag: int = 0) -> Work:
        return self._run("recv", (tensors,), rank, tag)


def _hosts(tensors: Tensors, what: str) -> Tensors:
    def host(x: Tensor) -> Tensor:
        if not on_device(x):
            raise Rejected(f"{what}: a tensor on {x.device}")
        if not x.is_contiguous():
            raise Rejected(f"{what}: a tensor that is not contiguous")
        return host_alias(x)

    return _map(host, tensors)


def _map(function: Any, tensors: Tensors) -> Tensors:
    return function(tensors) if isinstance(tensors, Tensor) else [_map(function, x) for x in tensors]


def _leaves(tensors: Tensors) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else [leaf for x in tensors for leaf in _leaves(x)]


def _overlap(x: Tensor, y: Tensor) -> bool:
    return x.data_ptr() < y.data_ptr() + y.nbytes and y.data_ptr() < x.data_ptr() + x.nbytes


def register_backend() -> None:
    """Register the backend under the device's name, for the device alone."""
    dist.Backend.register_backend(TYPE, Group, devices=[TYPE])
