"""Measure a module's memory, FLOPs and communication on the meta device, which only computes shapes.

So the planner needs no separate rules for what layers save, send or multiply. A stage of one layer takes tens of milliseconds.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from modeling.planning.operator_costs import (
    Shape,
    chunk_costs,
    operator_product,
    operator_volume,
    pending_bytes,
    tensor_bytes,
    tensors_in,
)
from parallel.activation_checkpointing import repeats_computed_once
from parallel.attention import delta_rule, kernels
from parallel.attention.kernels import Kernel
from parallel.attention.maxima import SCORES
from parallel.experts import dropless
from parallel.torch_internals import TorchDispatchMode, tree_leaves

Result = tuple[torch.Size, tuple[int, ...], torch.dtype] | int | None
"""What an operator returns: shape, strides and dtype, or the position of an argument; None: it has to run."""

_results: dict[Hashable, Result] = {}  # by the operator and what its arguments are
REMEMBERED = 100_000  # results at most; a search has some thousands


class Meter(TorchDispatchMode):
    """Counts the operators that run within it.

    Args:
        existing: tensors whose memory is not counted: parameters, buffers, inputs.
        sizes: size of every mesh axis.
        kernel: the attention kernel, whose scratch memory is counted.
        compiled: whether the run compiles: full recomputation then does not repeat experts on several ranks (dropless.py).

    Attributes:
        live: bytes of the tensors that are currently alive.
        peak: maximum of `live` so far.
        products: FLOPs of matrix products and attention by shape, recomputation and padding included.
        moved: bytes that all other operators, and copies of chunks, read and write.
        communication: bytes that this rank sends, by mesh axis.
    """

    def __init__(
        self,
        existing: Iterable[Tensor],
        sizes: Mapping[str, int],
        kernel: Kernel | None,
        compiled: bool = False,
    ) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.products: Counter[Shape] = Counter()
        self.moved = 0
        self.communication: Counter[str] = Counter()
        self._sizes, self._kernel, self._compiled = sizes, kernel, compiled
        self._existing = {tensor.untyped_storage()._cdata for tensor in existing}
        self._counted: set[int] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: nothing is compiled here, and torch's wrapper that skips it takes long for each operator."""
        return False

    def __torch_dispatch__(
        self, function: Any, _: Any, inputs: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        packet = function._overloadpacket
        experts = packet in (torch.ops.trainshed.experts, torch.ops.trainshed.experts_sum)
        if experts and self._compiled and repeats_computed_once():
            return _shaped(function, inputs, named or {})
        pending = pending_bytes(function, inputs)
        self.live += min(pending, 0)  # what has arrived is part of the scratch memory
        self.peak = max(self.peak, self.live + self._scratch(packet, inputs))
        self.live += max(pending, 0)
        scratch, copied = chunk_costs(function, inputs)
        self.peak = max(self.peak, self.live + scratch)
        self.moved += copied
        results = _shaped(function, inputs, named or {})
        for result in tensors_in(results):
            self._allocate(result)
        product = operator_product(function, inputs, results)
        volume = operator_volume(function, inputs, self._sizes)
        if product:
            self.products[product[0]] += product[1]
        if volume:
            self.communication[volume[0]] += volume[1]
        if not (product or volume or function.is_view):
            self.moved += tensor_bytes([*inputs]) + tensor_bytes(results)
        return results

    def _scratch(self, packet: Any, inputs: tuple[Any, ...]) -> int:
        """Temporary bytes of one of our operators, besides those of products in chunks; 0 for others."""
        ours = torch.ops.trainshed
        backward = packet in (ours.experts_backward, ours.gated_delta_rule_backward)
        if packet is ours.attention_backward and self._kernel is not None:
            name = inputs[-1]  # the formulas, for soft caps that the device's kernel does not have
            kernel = kernels.get_kernel(name) if name.startswith(kernels.SOFT_CAP) else self._kernel
            return kernel.scratch_bytes(inputs[1], inputs[2], causal=True)
        if packet is ours.max_scores:
            q, k, _, _, ranks, *_ = inputs
            gathered = ranks * tensor_bytes(k) if ranks > 1 else 0
            return gathered + SCORES.scratch_bytes(q, k, causal=True)
        if packet in (ours.experts, ours.experts_backward):
            x, order, gate_up = (inputs[index + backward] for index in (0, 2, 6))
            updated = any(isinstance(each, Tensor) for each in inputs[10 + backward : 14 + backward])
            return dropless.scratch_bytes(x, order.numel(), gate_up, backward, updated)
        if packet in (ours.gated_delta_rule, ours.gated_delta_rule_backward):
            k, v, decay = inputs[1 + 2 * backward : 4 + 2 * backward]
            return delta_rule.scratch_bytes(k, v, decay, inputs[-1], backward)
        return 0

    def _allocate(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._existing or key in self._counted:
            return
        self._counted.add(key)
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, key, storage.nbytes())

    def _free(self, key: int, size: int) -> None:
        self._counted.discard(key)
        self.live -= size


def _shaped(function: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """What an operator returns on the meta device.

    torch computes a shape in a millisecond of Python or more, and layers repeat their operators: a result is remembered for equal
    shapes, strides and dtypes of the inputs, if the operator returns one tensor that shares no memory with them, or one of them.
    """
    given = (*inputs, *named.values())
    described = tuple(map(_described, given))
    key = (function, described, tuple(named))
    try:
        known = _results.get(key)
    except TypeError:  # an input that cannot be a key
        return function(*inputs, **named)
    if isinstance(known, int):
        return given[known]
    if known is not None:
        size, stride, dtype = known
        return torch.empty_strided(size, stride, dtype=dtype, device="meta")
    result = function(*inputs, **named)
    if key not in _results and len(_results) < REMEMBERED:
        same = [position for position, each in enumerate(given) if each is result]
        if same and isinstance(result, Tensor):  # written in place, and perhaps resized
            # An argument may be given twice: `out` is the last one, and others are written in their first place.
            written = same[-1] if same[-1] >= len(inputs) else same[0]
            _results[key] = written if _described(result) == described[written] else None
        else:
            _results[key] = _remembered(function, result, tree_leaves(given))
    return result


def _described(value: Any) -> Any:
    """A part of the key of `_results`: equal only if results are."""
    if isinstance(value, Tensor):
        return Tensor, value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, list | tuple):
        return tuple(map(_described, value))
    return type(value), value  # 1, 1.0 and True are equal, but promote dtypes differently


def _remembered(function: Any, result: Any, inputs: Sequence[Any]) -> Result:
    schema = function._schema
    if schema.is_mutable or not isinstance(result, Tensor) or any(each.alias_info for each in schema.returns):
        return None
    like = torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device="meta")
    given = {each.untyped_storage()._cdata for each in inputs if isinstance(each, Tensor)}
    if result.untyped_storage()._cdata in given:  # what an operator of a package may return
        return None
    whole = result.untyped_storage().nbytes() == like.untyped_storage().nbytes() and result.is_meta
    return (result.shape, result.stride(), result.dtype) if whole else None
