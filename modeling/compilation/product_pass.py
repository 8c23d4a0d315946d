"""Inductor pass for CPUs: oneDNN for large float32 products, as in eager (parallel/host_products.py).

Runs on forward and backward graphs after they are split, so captured graphs, traces and FLOP counts have torch's products only.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.fx import Graph, Node

from parallel import host_products
from parallel.torch_internals import CustomGraphPass, OpOverload

_aten, _ours = torch.ops.aten, torch.ops.trainshed


class OneDNNProducts(CustomGraphPass):
    """Replaces mm, addmm with a bias, and addmm whose result overwrites the matrix that it adds to."""

    def __call__(self, graph: Graph) -> None:
        for node in list(graph.nodes):
            if node.target is _aten.mm.default and _is_large(*node.args):
                _replace(node, _ours.product.default, node.args)
            elif node.target is _aten.addmm.default and not node.kwargs and _is_large(*node.args[1:]):
                total, a, b = node.args
                if total.meta["val"].dim() == 1:
                    _replace(node, _ours.product.default, (a, b, total))
                elif copy := _overwriting(node, total):
                    graph.erase_node(copy)
                    _replace(node, _ours.add_product.default, (total, a, b))

    def uuid(self) -> str:
        """Cache key of this pass: its code, and whether it replaces products on this processor."""
        return f"{host_products.ONEDNN_IS_FASTER}" + "".join(
            Path(file).read_text() for file in (__file__, host_products.__file__)
        )


def _is_large(a: Node, b: Node) -> bool:
    return host_products.suits_onednn(a.meta["val"], b.meta["val"].shape[1])


def _overwriting(node: Node, total: Node) -> Node | None:
    """The copy of a node's result to its input `total`, if nothing else uses either."""
    copy = next(iter(node.users)) if len(node.users) == 1 else None
    if copy and copy.target is _aten.copy_.default and copy.args[0] is total and not copy.users:
        return copy if set(total.users) == {node, copy} else None
    return None


def _replace(node: Node, operator: OpOverload, arguments: tuple[Node, ...]) -> None:
    with node.graph.inserting_before(node):
        new = node.graph.call_function(operator, arguments)
    new.meta.update(node.meta)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
