"""Grouped-query attention's Q, K and V in one column-parallel product, at any tensor degree.

Over t tensor ranks with n query and k KV heads:

    t ≤ k    every rank holds n/t query heads and k/t KV heads (t divides k)
    t > k    m = t/k neighbouring ranks share a KV head; each holds n/t of the query heads that belong to it

Query heads keep their natural order: rank t's are [t·n/t, (t+1)·n/t), and their KV head is t // m, so each rank's heads meet
their own. A rank's weight is [q; k; v] stacked by rows.

Gradients: the m replicas of a KV head each see the gradient from their own query heads. Their weight gradients must be the
same sum, so dK and dV are summed over the replicas (not averaged) before dW. The input's gradient is summed over the whole
tensor axis anyway, so each rank puts in its own, unsummed part: the same as dividing the summed one by m.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from parallel import collectives
from parallel.backward import wanted
from parallel.constraints import kv_replicas, valid_tensor_degrees
from parallel.initialization import Constant, Initializer, Normal
from parallel.layers import ColumnLinear, check_width, column_input_gradient
from parallel.layout import Layout, Section, parameter
from parallel.mesh import Axis, Mesh


class ReplicatedKVLinear(Function):
    """X (b·s, h) or (b·s/t, h) -> [q, k, v] (b·s, (n/t + 2)·d), with the rule of gradients above."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        axis: Axis,
        replicas: Axis,
        query_width: int,
        sequence: bool,
    ) -> Tensor:
        ctx.replicas, ctx.query_width = replicas, query_width
        return ColumnLinear.forward(ctx, x, weight, bias, axis, sequence)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        query, key_value = grad[:, : ctx.query_width], grad[:, ctx.query_width :]
        grad_weight = grad_bias = None
        if wanted(ctx, 1):
            summing = collectives.start_all_reduce(key_value, ctx.replicas)
        grad_x, whole_x = column_input_gradient(ctx, grad, x, weight)
        if wanted(ctx, 1):
            key_value = summing.wait()
            grad_weight = torch.cat((query.t() @ whole_x, key_value.t() @ whole_x))
            grad_bias = torch.cat((query.sum(0), key_value.sum(0))) if ctx.bias else None
        return grad_x.wait() if grad_x else None, grad_weight, grad_bias, None, None, None, None


class GQAQKVColumnParallelLinear(nn.Module):
    """Q, K and V for grouped-query, multi-query or multi-head attention.

    Args:
        hidden: h.
        heads: n query heads.
        kv_heads: k KV heads; divides n.
        head_dim: d.
        mesh: its tensor axis, unfolded into (kv shard, kv replica) with max(1, t/k) replicas.
        bias: whether Q, K and V have one.
        sequence_parallel: whether the input is (b·s/t, h).

    Raises:
        ValueError: a tensor degree that does not work, with its neighbours that do.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        mesh: Mesh,
        *,
        bias: bool = False,
        sequence_parallel: bool = False,
        initializer: Initializer | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        degree = mesh.tensor.size
        check_degree(heads, kv_heads, degree)
        replicas = kv_replicas(kv_heads, degree)
        if mesh.kv_replicas != replicas:
            raise ValueError(
                f"GQAQKVColumnParallelLinear: {kv_heads} KV heads over tensor = {degree} need kv_replicas = {replicas}, "
                f"the mesh has {mesh.kv_replicas}"
            )
        self.hidden, self.head_dim = hidden, head_dim
        self.axis, self.replicas = mesh.tensor, mesh.kv_replica
        self.sequence = sequence_parallel and degree > 1
        self.heads = heads // degree
        self.kv_heads = kv_heads * replicas // degree
        q, kv = heads * head_dim, kv_heads * head_dim
        sections = (("q", q, 1), ("k", kv, replicas), ("v", kv, replicas))
        rows = tuple(Section(name, (size, hidden), 0, m) for name, size, m in sections)
        self.weight = parameter(Layout(rows, degree, initializer or Normal(0.02)), dtype, device)
        self.bias = None
        if bias:
            entries = tuple(Section(name, (size,), 0, m) for name, size, m in sections)
            self.bias = parameter(Layout(entries, degree, Constant(0.0)), dtype, device)

    def forward(self, x: Tensor) -> Tensor:
        """(b·s, h) or (b·s/t, h) -> (b·s, (n + 2k)·d) of this rank: its query heads, then its K, then its V heads."""
        check_width(self, x, self.hidden)
        if self.axis.size == 1:
            return F.linear(x, self.weight, self.bias)
        if self.replicas.size == 1:
            return ColumnLinear.apply(x, self.weight, self.bias, self.axis, self.sequence)
        width = self.heads * self.head_dim
        return ReplicatedKVLinear.apply(
            x, self.weight, self.bias, self.axis, self.replicas, width, self.sequence
        )


def check_degree(heads: int, kv_heads: int, degree: int) -> None:
    """Raise ValueError, naming the neighbours that work, unless the degree is valid."""
    if heads % kv_heads:
        raise ValueError(f"GQAQKVColumnParallelLinear: {kv_heads} KV heads do not divide {heads} query heads")
    valid = valid_tensor_degrees(heads, kv_heads)
    if degree not in valid:
        below = [t for t in valid if t < degree][-1:]
        above = [t for t in valid if t > degree][:1]
        raise ValueError(
            f"GQAQKVColumnParallelLinear: tensor = {degree} does not fit {heads} query and {kv_heads} KV heads; "
            f"nearest that do: {', '.join(map(str, below + above))}"
        )
