"""Figures of traced graphs: floating-point operations, bytes sent, memory, and a digest by which graphs are told apart.

FLOPs    2 a multiply-add of matrix products and attention (causal: half its square)
sent     bytes a rank puts on the network, by axis, with collectives as rings: (n-1)/n of what is gathered or scattered, twice
         that where all-reduced, all but an n-th of an exchange, n-1 times K and V around a ring
operators  how often each stands in a graph, by its name without the overload: "aten.mm"
peak     the most bytes of a graph's own results that are alive at a time, in the order of the graph
kept     bytes that autograd holds from forward to backward, parameters left out, memory that is shared counted once
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node


@dataclass(frozen=True)
class Graph:
    """One forward or backward graph; bytes and operations of one call on one rank."""

    nodes: int
    flops: int
    sent: Mapping[str, int]
    peak: int
    operators: Mapping[str, int]


@dataclass(frozen=True)
class Stage:
    """One stage of the pipeline.

    Attributes:
        layers: (first, end).
        kept: bytes autograd keeps of a microbatch.
        peak: the most that one of its graphs needs besides.
    """

    layers: tuple[int, int]
    kept: int
    peak: int


def digest(graphs: Sequence[GraphModule]) -> str:
    """Of graphs: their operations, arguments, shapes, types and layouts, in order: 32 hex digits."""
    total = hashlib.sha256()
    for graph in graphs:
        for node in graph.graph.nodes:
            values = [_kind(value) for value in _tensors(node.meta.get("val"))]
            line = f"{node.name} {node.op} {node.target} {node.args} {dict(node.kwargs)} {values}\n"
            total.update(line.encode())
        total.update(b"\0")
    return total.hexdigest()[:32]


def of(graph: GraphModule) -> Graph:
    """A graph's figures. ValueError where a shape is not known before it runs: compilers of accelerators take none such."""
    _require_static(graph)
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    sent: dict[str, int] = {}
    for node in nodes:
        axis, size = _sent(node)
        if size:
            sent[axis] = sent.get(axis, 0) + size
    return Graph(len(nodes), sum(map(_flops, nodes)), sent, _peak(graph), _operators(nodes))


def kept_bytes(end: Tensor, constant: Iterable[Tensor]) -> int:
    """Bytes of what autograd keeps for the backward of `end`, besides `constant` tensors."""
    known = {tensor.untyped_storage()._cdata for tensor in constant}
    total, waiting, seen = 0, [end.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for tensor in _saved(node):
            storage = tensor.untyped_storage()
            if storage._cdata not in known:
                known.add(storage._cdata)
                total += storage.nbytes()
        waiting += [following for following, _ in node.next_functions]
    return total


def _saved(node: Any) -> list[Tensor]:
    """What a node of autograd's graph keeps."""
    held = list(getattr(node, "saved_tensors", ()))
    held += [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
    return [value for value in held if isinstance(value, Tensor)]


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for each in value for tensor in _tensors(each)] if isinstance(value, list | tuple) else []


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.stride() if tensor.layout == torch.strided else ()


def _bytes(value: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(value))


def _value(argument: Any) -> Any:
    return argument.meta.get("val") if isinstance(argument, Node) else argument


def _require_static(graph: GraphModule) -> None:
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        shapes = [tuple(tensor.shape) for tensor in _tensors(value)]
        if isinstance(value, torch.SymInt) or not all(
            isinstance(size, int) for shape in shapes for size in shape
        ):
            raise ValueError(f"{node.name}: a shape that is not known before it runs: {shapes or value}")


def _operators(nodes: Sequence[Node]) -> dict[str, int]:
    packets = [getattr(node.target, "overloadpacket", None) for node in nodes]  # none of Python's own getitem
    return dict(sorted(Counter(str(packet) for packet in packets if packet is not None).items()))


def _flops(node: Node) -> int:
    from torch.utils.flop_counter import flop_registry

    name = str(node.target).removesuffix(".default")
    arguments = [_value(argument) for argument in node.args]
    if name.startswith(("trainshed.attention", "trainshed.ring_attention")):
        backward = "backward" in name
        q, k = arguments[1:3] if backward else arguments[:2]
        ring = "ring" in name
        causal, axes = (arguments[-3], arguments[-4]) if ring else (arguments[-3], 1)
        square = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] * axes * q.shape[3]
        # Two products forward; backward makes the scores again and has four more.
        return square * (10 if backward else 4) // (2 if causal else 1)
    formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
    return int(formula(*arguments, **node.kwargs, out_val=node.meta.get("val"))) if formula else 0


def _sent(node: Node) -> tuple[str, int]:
    """The axis and the bytes that a node sends."""
    namespace, _, name = str(node.target).partition(".")
    arguments = [_value(argument) for argument in node.args]
    if namespace == "_c10d_functional" and not name.startswith("wait"):
        size, axis = _bytes(arguments[0]), arguments[-1]
        if name.startswith("all_gather"):
            return axis, size * (arguments[1] - 1)
        if name.startswith("reduce_scatter"):
            return axis, size - size // arguments[2]
        if name.startswith("all_to_all"):
            return axis, size - size // len(arguments[1])
        return axis, 2 * size  # all-reduce, whose degree its arguments do not say
    if namespace == "trainshed" and name.startswith("ring_attention"):
        axis, degree = arguments[-5:-3]
        kv = arguments[2:4] if "backward" in name else arguments[1:3]
        if "backward" in name:  # one shift less of K and V, and their gradients, in float32
            gradients = sum(tensor.numel() * 4 for tensor in kv)
            return axis, _bytes(kv) * max(0, degree - 2) + gradients * (degree - 1)
        return axis, _bytes(kv) * (degree - 1)
    return "", 0


def _peak(graph: GraphModule) -> int:
    """Bytes of results alive at once; views count with what they view, inputs are others' memory."""
    last: dict[Node, Node] = {}
    for node in graph.graph.nodes:
        for argument in node.all_input_nodes:
            last[argument] = node
    ends: dict[Node, list[Node]] = {}
    for node, user in last.items():
        ends.setdefault(user, []).append(node)
    users: dict[int, int] = {}  # how many living nodes share a storage
    sizes: dict[int, int] = {}
    alive = peak = 0
    for node in graph.graph.nodes:
        for storage, size in _storages(node):
            if storage not in users:
                users[storage], sizes[storage] = 0, 0 if node.op == "placeholder" else size
                alive += sizes[storage]
            users[storage] += 1
        peak = max(peak, alive)
        for done in ends.get(node, ()):
            for storage, _ in _storages(done):
                users[storage] -= 1
                if users[storage] == 0:
                    alive -= sizes[storage]
                    del users[storage]
    return peak


def _storages(node: Node) -> list[tuple[int, int]]:
    if node.op == "output":
        return []
    return [
        (tensor.untyped_storage()._cdata, math.ceil(tensor.untyped_storage().nbytes()))
        for tensor in _tensors(node.meta.get("val"))
    ]
