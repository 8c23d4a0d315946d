"""What a piece of a model takes, counted while it runs on the meta device, where shapes are real and nothing is computed.

A `Meter` sees every operation and counts

    live    bytes of tensors that exist at a time, those from before left out; `peak` is the most
    sent    bytes that this rank sends over each axis of the mesh
    flops   of matrix products and of attention (causal: half of a square), recomputation and padding included

so the planner has no rules of its own about what layers keep, send or multiply. A stage of one layer takes about 30 ms.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed._functional_collectives  # the collectives' shapes on the meta device
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parallel.attention.kernels import Kernel

_aten, _c10d = torch.ops.aten, torch.ops._c10d_functional
BACKWARD = 2.5  # products in attention's backward for each in forward: scores again, dv, dp, dq, dk


class Meter(TorchDispatchMode):
    """Counts what runs inside of it.

    Args:
        known: tensors that are there already and are not counted.
        sizes: of the mesh's axes by name.
        kernel: of attention, whose scratch memory is counted.
    """

    def __init__(self, known: Iterable[Tensor], sizes: Mapping[str, int], kernel: Kernel | None) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.flops = 0.0
        self.sent: Counter[str] = Counter()
        self._sizes, self._kernel = sizes, kernel
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._counted: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, inputs: tuple = (), named: dict | None = None
    ) -> Any:
        packet = function._overloadpacket
        if packet is torch.ops.trainshed.attention_backward and self._kernel is not None:
            self.peak = max(self.peak, self.live + self._kernel.scratch(inputs[1], inputs[2], causal=True))
        results = function(*inputs, **(named or {}))
        for result in tree_leaves(results):
            if isinstance(result, Tensor):
                self._see(result)
        self.flops += _flops(packet, inputs, results, self._sizes)
        sent = _sent(packet, inputs, self._sizes)
        if sent:
            self.sent[sent[0]] += sent[1]
        return results

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known or key in self._counted:
            return
        self._counted.add(key)
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._gone, key, storage.nbytes())

    def _gone(self, key: int, size: int) -> None:
        self._counted.discard(key)
        self.live -= size


def _flops(operation: Any, inputs: tuple, results: Any, sizes: Mapping[str, int]) -> float:
    if operation in (_aten.mm, _aten.bmm):
        return 2 * results.numel() * inputs[0].shape[-1]
    if operation in (_aten.addmm, _aten.addmm_):
        return 2 * results.numel() * inputs[1].shape[-1]
    if operation in (torch.ops.trainshed.attention, torch.ops.trainshed.ring_attention):
        return _attention(inputs[0], operation, sizes)
    if operation in (torch.ops.trainshed.attention_backward, torch.ops.trainshed.ring_attention_backward):
        return BACKWARD * _attention(inputs[1], operation, sizes)
    return 0


def _attention(q: Tensor, operation: Any, sizes: Mapping[str, int]) -> float:
    b, n, s, d = q.shape
    ring = "ring" in operation.__name__
    return 2 * b * n * s * (s * sizes["context"] if ring else s) * d


def _sent(operation: Any, inputs: tuple, sizes: Mapping[str, int]) -> tuple[str, int] | None:
    """Axis and bytes that one rank sends; of the formulas in collectives.py and ring_attention.py."""
    if operation is torch.ops.trainshed.ring_attention:
        return "context", (sizes["context"] - 1) * sum(map(_bytes, inputs[1:3]))
    if operation is torch.ops.trainshed.ring_attention_backward:
        elements, shifts = inputs[2].numel() + inputs[3].numel(), sizes["context"] - 1
        size = inputs[2].element_size()
        return "context", elements * (max(0, shifts - 1) * size + shifts * max(4, size))
    if operation not in (
        *(_c10d.all_gather_into_tensor, _c10d.all_gather_into_tensor_out, _c10d.reduce_scatter_tensor),
        *(_c10d.all_reduce, _c10d.all_to_all_single),
    ):
        return None
    axis = next(value for value in reversed(inputs) if isinstance(value, str))
    size, whole = sizes[axis], _bytes(inputs[0])
    if operation in (_c10d.all_gather_into_tensor, _c10d.all_gather_into_tensor_out):
        return axis, whole * (size - 1)
    return axis, math.ceil((2 if operation is _c10d.all_reduce else 1) * whole * (size - 1) / size)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
