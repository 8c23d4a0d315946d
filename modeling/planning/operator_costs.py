"""FLOPs and communication volume of an operator, in meta runs (meter.py) or traces (graph_stats.py).

FLOPs    2 per multiply-add of matrix products and attention. Attention has 2 products in forward and 5 in backward (recomputed
         scores, dV, dP, dQ, dK), its largest scores 1; causal attention counts half of each, and a sliding window only the keys
         in it. Of the gated delta rule, every product of its chunks, which backward computes again
volume   bytes that one rank sends, with collectives as rings over n ranks: (n-1)/n of a gathered, scattered or exchanged tensor,
         twice that for an all-reduce; products that overlap with a collective send as much as it; ring attention sends K and V
         n-1 times, in backward n-2 times, and their float32 gradients n-1 times, and for the largest scores K n-1 times; experts
         exchange the rows of T·k choices twice in forward, and twice in backward, or three times if forward did not keep the
         received rows

The experts' load is assumed to be balanced: a rank computes as many rows as its tokens have choices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from modeling.models.flops import visible_keys
from parallel.attention import (
    attention,  # noqa: F401  registers its operators
    delta_rule,
    maxima,  # noqa: F401  registers its operators
    ring,  # noqa: F401  registers its operators
)
from parallel.experts import dropless  # noqa: F401  registers its operators
from parallel.layers import overlap
from parallel.layers.products import EMULATED, named
from parallel.mesh import Axis, Mesh
from parallel.torch_internals import (
    OpOverload,
    all_gather_into_tensor,
    all_gather_into_tensor_out,
    all_reduce,
    all_to_all_single,
    functional_collectives,  # noqa: F401  registers meta implementations of collectives
    reduce_scatter_tensor,
    scaled_mm,
)

_aten, _ours = torch.ops.aten, torch.ops.trainshed
# index of the left factor among the arguments
_PRODUCTS = {
    **dict.fromkeys((_aten.mm, _aten.bmm, scaled_mm, _ours.mx_product), 0),
    **dict.fromkeys((_aten.addmm, _aten.addmm_, _aten.baddbmm), 1),
}
_FP8 = (scaled_mm, _ours.mx_product)
_GATHERS = (all_gather_into_tensor, all_gather_into_tensor_out)
_COLLECTIVES = (*_GATHERS, reduce_scatter_tensor, all_reduce, all_to_all_single)
_RINGS = (_ours.ring_attention, _ours.ring_attention_backward)
_EXPERTS = (_ours.experts, _ours.experts_backward)
_AROUND_EXPERTS = (_ours.expert_order, _ours.experts_sum, _ours.experts_send)
# products of scores, by operator
_FLEX = {torch.ops.higher_order.flex_attention: 2, torch.ops.higher_order.flex_attention_backward: 5}
_GATHERED, _SCATTERED = _ours.gather_product, _ours.scatter_product  # products in chunks
_BESIDE = (_ours.gather_beside_product, _ours.scatter_beside_product)
_RULES = (_ours.gated_delta_rule, _ours.gated_delta_rule_backward)
_ATTENTION = (_ours.attention, _ours.attention_backward, *_RINGS, _ours.max_scores)


Shape = tuple[str, int, int, int]
"""A product: "matmul", "fp8" in 8 bits or "experts", rows, inner and columns; or "attention", queries, keys and head size."""


def masked_attention_flops(target: Any, arguments: Sequence[Any]) -> int:
    """FLOPs of a call of FlexAttention, as if its mask were causal; 0 for other targets."""
    if target not in _FLEX:
        return 0
    (b, n, s, d), keys = arguments[0].shape, arguments[1].shape[2]
    return int(_FLEX[target] * 2 * b * n * s * visible_keys(keys) * d)


def operator_product(operator: OpOverload, arguments: Sequence[Any], result: Any) -> tuple[Shape, int] | None:
    """Shape and FLOPs of a matrix product or of attention; None for other operators."""
    packet = operator.overloadpacket
    if packet in _PRODUCTS:
        inner = arguments[_PRODUCTS[packet]].shape[-1]
        rows, columns = result.shape[-2:]
        operation = "fp8" if packet in _FP8 else "matmul"
        return (operation, rows, inner, columns), 2 * result.numel() * inner
    if packet is _ours.add_product:
        call = _bind(operator, arguments)
        (rows, inner), columns = call["a"].shape, call["b"].shape[1]
        return ("matmul", rows, inner, columns), 2 * rows * inner * columns
    if packet in (_GATHERED, _SCATTERED, *_BESIDE):
        call = _bind(operator, arguments)
        (rows, inner), columns = call["a"].shape, len(call["b"])
        rows *= call["size"] if packet is _GATHERED else 1
        eight = call["a_scale"] is not None and not call["products"].endswith(EMULATED)
        return ("fp8" if eight else "matmul", rows, inner, columns), 2 * rows * inner * columns
    if packet in _ATTENTION:
        call = _bind(operator, arguments)
        return _attention(operator, call["q"], call["k"], call["causal"], call.get("size", 1), call["window"])
    if packet in _EXPERTS:
        return _experts(operator, _bind(operator, arguments))
    if packet in _RULES:
        call = _bind(operator, arguments)
        (b, s, n, u), d, chunk = call["v"].shape, call["k"].shape[-1], call["chunk"]
        padded = s + -s % chunk
        each = delta_rule.executed_multiply_adds(d, u, chunk, packet is _ours.gated_delta_rule_backward)
        return ("matmul", chunk, d, u), 2 * b * padded * n * each
    if packet.__name__.startswith("_scaled_dot_product"):  # torch's own kernels
        call = _bind(operator, arguments)
        return _attention(operator, call["query"], call["key"], call["is_causal"])
    return None


def _experts(operator: OpOverload, call: Mapping[str, Any]) -> tuple[Shape, int]:
    rows, gate_up = call["order"].numel(), call["gate_up"]  # (E/n, 2f, h)
    backward, (count, wide, hidden) = "backward" in str(operator), gate_up.shape
    products = 1.0
    if backward:
        products = 1 if call["frozen"] else 2
        products += 2 / 3 if call["size"] > 1 and not call["keep"] else 0  # [gate, up] once more
    # An update's factors A are multiplied by once in forward and three times in backward, B once and twice.
    again = {"a": 3, "b": 2} if backward else {"a": 1, "b": 1}
    updates = sum(
        again[letter] * factor.numel() // count
        for name in ("gate_up", "down")
        for letter in "ab"
        if (factor := call[f"{name}_{letter}"]) is not None
    )
    shape = ("experts", max(1, rows // count), hidden, wide)
    return shape, int(rows * (products * 3 * wide * hidden + 2 * updates))


def _attention(
    operator: OpOverload, q: Tensor, k: Tensor, causal: bool, context: int = 1, window: int | None = None
) -> tuple[Shape, int]:
    b, n, s, d = q.shape
    keys = k.shape[2] * context
    products = 5 if "backward" in str(operator) else 1 if operator.overloadpacket is _ours.max_scores else 2
    seen = visible_keys(keys, window) if causal else keys  # by a query, on average
    return ("attention", s, keys, d), int(products * 2 * b * n * s * seen * d)


def operator_volume(
    operator: OpOverload, arguments: Sequence[Any], sizes: Mapping[str, int]
) -> tuple[str, int] | None:
    """Mesh axis and bytes that a rank sends over it in a call; None for operators that send nothing.

    Args:
        sizes: size of every mesh axis (`axis_sizes`).
    """
    packet = operator.overloadpacket
    if packet in _COLLECTIVES:
        call = _bind(operator, arguments)
        axis, size = call["group_name"], tensor_bytes(call["input"])
        n = sizes[axis]
        if packet in _GATHERS:
            return axis, size * (n - 1)  # the input is one shard
        return axis, -(-(2 if packet is all_reduce else 1) * size * (n - 1) // n)
    if packet in (_GATHERED, _SCATTERED, *_BESIDE):
        call = _bind(operator, arguments)
        return call["axis"], _overlapping_volume(packet, call)
    if packet in (*_EXPERTS, *_AROUND_EXPERTS):
        call = _bind(operator, arguments)
        exchanges = {_ours.experts: 2, _ours.experts_backward: 1}.get(packet, 0)
        exchanges = _sent_to_experts(call) if packet is _ours.experts_send else exchanges
        rows = _rows_of_experts(call) if exchanges else 0  # the others send numbers of rows, or nothing
        return call["axis"], exchanges * rows * (call["size"] - 1) // call["size"]
    if packet is _ours.max_scores:
        call = _bind(operator, arguments)
        return (call["axis"], tensor_bytes(call["k"]) * (call["size"] - 1)) if call["size"] > 1 else None
    if packet in _RINGS:
        call = _bind(operator, arguments)
        axis, n, k, v = (call[name] for name in ("axis", "size", "k", "v"))
        if packet is _ours.ring_attention:
            return axis, tensor_bytes([k, v]) * (n - 1)
        gradients = (k.numel() + v.numel()) * max(4, k.element_size())
        return axis, tensor_bytes([k, v]) * max(0, n - 2) + gradients * (n - 1)
    return None


def _overlapping_volume(packet: Any, call: Mapping[str, Any]) -> int:
    """Bytes that a rank sends in a product that overlaps with a collective."""
    n = call["size"]
    if packet is _GATHERED:
        scales = call["a_scale"] if named(call["products"]).scales_rows else None
        return tensor_bytes([call["a"], scales]) * (n - 1)
    if packet is _SCATTERED:
        return -(-len(call["a"]) * len(call["b"]) * call["dtype"].itemsize * (n - 1) // n)
    size = tensor_bytes(call["x"]) * (n - 1)
    return size if packet is _BESIDE[0] else -(-size // n)


def chunk_costs(operator: OpOverload, arguments: Sequence[Any]) -> tuple[int, int]:
    """Bytes that a product in chunks allocates besides its results, and that it copies; 0 for others."""
    packet = operator.overloadpacket
    if packet not in (_GATHERED, _SCATTERED):
        return 0, 0
    call, scatters = _bind(operator, arguments), packet is _SCATTERED
    a, b, size, dtype = (call[name] for name in ("a", "b", "size", "dtype"))
    scratch = overlap.scratch_bytes(a, b, size, call["chunks"], dtype, scatters)
    return scratch, overlap.copied_bytes(a, b, size, dtype, scatters, call.get("keep", False))


def pending_bytes(operator: OpOverload, arguments: Sequence[Any]) -> int:
    """Bytes of experts' rows under way, sent and received, from a call on; negative: until this call."""
    packet = operator.overloadpacket
    if packet not in (*_EXPERTS, *_AROUND_EXPERTS):
        return 0
    call = _bind(operator, arguments)
    if packet is _ours.expert_order or call["size"] == 1:
        return 0
    if packet is _ours.experts_backward:
        return -2 * (1 if call["keep"] else 2) * _rows_of_experts(call)
    if packet is _ours.experts_send:
        return 2 * _sent_to_experts(call) * _rows_of_experts(call)
    return 2 * _rows_of_experts(call) * (1 if packet is _ours.experts else -1)


def _sent_to_experts(call: Mapping[str, Any]) -> int:
    """Exchanges that backward starts with: of gradients, and of rows that forward did not save."""
    return 1 if call["x"] is None else 2


def _rows_of_experts(call: Mapping[str, Any]) -> int:
    """Bytes of T·k rows."""
    like = call["grad"] if call["x"] is None else call["x"]
    return int(call["order"].numel() * like.shape[1] * like.element_size())


def axis_sizes(mesh: Mesh) -> dict[str, int]:
    """Size of every axis of a mesh by the name that collectives use."""
    return {axis.name: axis.size for axis in vars(mesh).values() if isinstance(axis, Axis)}


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a value, and in nested lists and tuples."""
    if isinstance(value, Tensor):
        return [value]
    items = value if isinstance(value, list | tuple) else ()
    return [tensor for item in items for tensor in tensors_in(item)]


def tensor_bytes(value: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(value))


def _bind(operator: OpOverload, arguments: Sequence[Any]) -> dict[str, Any]:
    """Arguments by their names in the operator's schema, including defaults."""
    schema = operator._schema.arguments
    defaults = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    return defaults | {argument.name: value for argument, value in zip(schema, arguments, strict=False)}
