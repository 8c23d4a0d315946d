"""Statistics of traced graphs: FLOPs, communication volume, memory, operators.

FLOPs, communication
             per operator as in modeling/planning/operator_costs.py
peak         maximum bytes that a graph needs in addition to its inputs, in the graph's order, with the memory of chunks
             (parallel/layers/overlap.py); an elementwise result that is only copied to an input is written there
saved        bytes that autograd saves from forward to backward, parameters excluded, shared memory counted once
operators    number of calls by operator name without the overload: "aten.mm"
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from modeling.planning.operator_costs import (
    chunk_costs,
    masked_attention_flops,
    operator_product,
    operator_volume,
    pending_bytes,
    tensors_in,
)
from parallel.torch_internals import OpOverload, tree_map, wait_tensor


@dataclass(frozen=True)
class GraphStats:
    """One forward or backward graph; bytes and FLOPs of one call on one rank."""

    nodes: int  # number of calls
    flops: int
    communication: Mapping[str, int]  # bytes by mesh axis
    peak: int
    operators: Mapping[str, int]


@dataclass(frozen=True)
class StageStats:
    """One pipeline stage."""

    layers: tuple[int, int]  # (first, end)
    saved: int  # bytes that autograd saves per microbatch
    peak: int  # maximum bytes that one of its graphs needs in addition


def measure(graph: GraphModule, sizes: Mapping[str, int], consumed: Collection[str] = ()) -> GraphStats:
    """Statistics of a graph.

    Args:
        sizes: size of every mesh axis.
        consumed: names of inputs that are freed after their last use (`consumed_inputs`).

    Raises:
        ValueError: a shape is dynamic, which accelerator compilers do not accept.
    """
    _require_static(graph)
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    calls = [(*call, _value(node)) for node in nodes for call in _calls(node)]
    volumes = [operator_volume(operator, arguments, sizes) for operator, arguments, _ in calls]
    communication: Counter[str] = Counter()
    for axis, size in filter(None, volumes):
        communication[axis] += size
    names = Counter(str(operator.overloadpacket) for operator, _, _ in calls)
    products = (operator_product(*call) for call in calls)
    flops = sum(found[1] for found in products if found)
    flops += sum(masked_attention_flops(node.target, tree_map(_value, node.args)) for node in nodes)
    return GraphStats(
        len(nodes), flops, dict(+communication), _peak(graph, consumed), dict(sorted(names.items()))
    )


def consumed_inputs(forward: GraphModule, backward: GraphModule) -> dict[str, int]:
    """Bytes, by name, of a backward graph's inputs that only autograd holds.

    These are saved results of forward without other references. Autograd frees them with the layer's backward; inductor's code,
    to which it passes them, frees them after their last use.
    """
    named = {node.name: node for node in forward.graph.nodes}
    saved = [
        named[node.name] for node in backward.graph.nodes if node.op == "placeholder" and node.name in named
    ]
    outputs = forward.graph.output_node().args[0]
    assert isinstance(outputs, list | tuple)
    users = [
        node for node in outputs if isinstance(node, Node) and (node not in saved or outputs.count(node) > 1)
    ]
    parameters = [node for node in named.values() if node.op == "placeholder"]  # and the layer's input
    held = {storage for node in (*users, *parameters) for storage, _ in _storages(node)}
    return {
        node.name: sum(size for _, size in _storages(node))
        for node in saved
        if held.isdisjoint(storage for storage, _ in _storages(node))
    }


def saved_bytes(output: Tensor, constant: Iterable[Tensor]) -> int:
    """Bytes that autograd saves for the backward of `output`, excluding the `constant` tensors."""
    counted = {tensor.untyped_storage()._cdata for tensor in constant}
    total, pending, visited = 0, [output.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        for tensor in _saved_tensors(node):
            storage = tensor.untyped_storage()
            if storage._cdata not in counted:
                counted.add(storage._cdata)
                total += storage.nbytes()
        pending += [following for following, _ in node.next_functions]
    return total


def _saved_tensors(node: Any) -> list[Tensor]:
    """Tensors saved by a node of the autograd graph."""
    values = list(getattr(node, "saved_tensors", ()))
    values += [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
    return [value for value in values if isinstance(value, Tensor)]


def _calls(node: Node) -> list[tuple[OpOverload, list[Any]]]:
    """The operator that a node calls, and the values of its arguments; none for Python's getitem."""
    if isinstance(node.target, OpOverload):
        return [(node.target, tree_map(_value, list(node.args)))]
    for position, operator in enumerate(node.args):
        if isinstance(operator, OpOverload):  # called by a higher-order operator
            names = [argument.name for argument in operator._schema.arguments]
            # It names the arguments if it functionalizes the call.
            arguments = [*node.args[position + 1 :]] or [node.kwargs.get(name) for name in names]
            return [(operator, tree_map(_value, arguments))]
    return []


def _value(argument: Any) -> Any:
    return argument.meta.get("val") if isinstance(argument, Node) else argument


def _require_static(graph: GraphModule) -> None:
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        shapes = [tuple(tensor.shape) for tensor in tensors_in(value)]
        static = all(isinstance(size, int) for shape in shapes for size in shape)
        if isinstance(value, torch.SymInt) or not static:
            raise ValueError(f"{node.name}: dynamic shape {shapes or value}; every shape must be static")


def _peak(graph: GraphModule, consumed: Collection[str]) -> int:
    """Maximum bytes alive at once besides the inputs; consumed inputs are freed after their last use.

    What an elementwise operator computes only to be copied to an input is written there, as compilers do.

    A view shares its base's storage. So does the result of waiting for a collective, although fake tensors give it another one.
    """
    waited = {
        storage: _storages(node.args[0])[0][0]
        for node in graph.graph.nodes
        if node.target is wait_tensor.default
        for storage, _ in _storages(node)
    }

    def storages(node: Node) -> list[tuple[int, int]]:
        return [(waited.get(storage, storage), size) for storage, size in _storages(node)]

    written = {node.all_input_nodes[1] for node in graph.graph.nodes if _overwrites_input(node)}
    last_user: dict[Node, Node] = {}
    for node in graph.graph.nodes:
        for argument in node.all_input_nodes:
            last_user[argument] = node
    freed_after: dict[Node, list[Node]] = {}
    for node, user in last_user.items():
        freed_after.setdefault(user, []).append(node)
    users: dict[int, int] = {}  # number of live nodes that share a storage
    sizes: dict[int, int] = {}
    alive = peak = inputs = 0
    for node in graph.graph.nodes:
        for storage, size in storages(node):
            if storage not in users:
                kept = node in written or (node.op == "placeholder" and node.name not in consumed)
                users[storage], sizes[storage] = 0, 0 if kept else size
                alive += sizes[storage]
            users[storage] += 1
        if node.op == "placeholder":
            inputs = alive
        scratch = 0
        for call in _calls(node):
            scratch += chunk_costs(*call)[0]
            alive += pending_bytes(*call)
        peak = max(peak, alive + scratch)
        for freed in freed_after.get(node, ()):
            for storage, _ in storages(freed):
                users[storage] -= 1
                if users[storage] == 0:
                    alive -= sizes[storage]
                    del users[storage]
    return peak - inputs


def _overwrites_input(node: Node) -> bool:
    """Whether a node copies to an input what an elementwise operator computes for nothing else."""
    if node.target is not torch.ops.aten.copy_.default or len(node.all_input_nodes) != 2:
        return False
    target, value = node.all_input_nodes
    elementwise = torch.Tag.pointwise in getattr(value.target, "tags", ())
    return target.op == "placeholder" and elementwise and len(value.users) == 1


def _storages(node: Node) -> list[tuple[int, int]]:
    if node.op == "output":
        return []
    return [
        (tensor.untyped_storage()._cdata, math.ceil(tensor.untyped_storage().nbytes()))
        for tensor in tensors_in(node.meta.get("val"))
    ]
