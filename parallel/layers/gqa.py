"""Fused QKV projection of grouped-query attention, column-parallel at any valid tensor degree.

Over t tensor ranks with n query and k KV heads:

    t ≤ k    every rank holds n/t query heads and k/t KV heads (t divides k)
    t > k    m = t/k neighbouring ranks replicate a KV head; each holds n/t of its query heads

Query heads keep their natural order: rank r holds heads [r·n/t, (r+1)·n/t), whose KV head is r // m. A rank's weight is
[q; k; v] stacked by rows; with gates of the query heads, [gate; q; k; v].

Gradients: each of the m replicas of a KV head sees only the gradient from its own query heads. The replicas' weight gradients
must be the same sum, so dK and dV are summed (not averaged) over the replicas before dW. The input's gradient is summed over
the full tensor axis anyway, so each rank contributes its unsummed part.
"""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor
from torch.autograd import Function

from parallel import collectives
from parallel.backward import needs_gradient
from parallel.constraints import kv_replicas, valid_tensor_degrees
from parallel.layers.linear import (
    ColumnLinear,
    ColumnParallelLinear,
    LinearOptions,
    column_input_gradient,
    column_weight_gradient,
)
from parallel.mesh import Axis, Mesh


class ReplicatedKVLinear(Function):
    """X (b·s, h) or (b·s/t, h) -> [q, k, v] (b·s, (n/t + 2)·d), with the gradients described above."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis, *options: Any
    ) -> Tensor:
        """`options`: the axis of the replicas, the columns of the queries, and those of ColumnLinear."""
        ctx.replicas, ctx.query_width, *of_column = options
        return ColumnLinear.forward(ctx, x, weight, bias, axis, *of_column)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        query, key_value = grad[:, : ctx.query_width], grad[:, ctx.query_width :]
        grad_weight = grad_bias = deferred = None
        needs_weight = needs_gradient(ctx, 1)
        if needs_weight or ctx.deferred:
            reduction = collectives.PendingAllReduce(key_value, ctx.replicas)
        grad_x, full_x = column_input_gradient(ctx, grad, x, weight)
        if needs_weight or ctx.deferred:
            key_value = reduction.wait()
            grad_bias = torch.cat((query.sum(0), key_value.sum(0))) if ctx.bias else None
        if full_x is not None:
            parts = (
                column_weight_gradient(ctx, query, full_x, grad_x),
                ctx.products.weight_gradient(key_value, full_x),
            )
            grad_weight = torch.cat(parts)
        if ctx.deferred:
            deferred = torch.cat((query, key_value), 1)
        return grad_x.wait() if grad_x else None, grad_weight, grad_bias, *(None,) * 5, deferred


class GQAQKVColumnParallelLinear(ColumnParallelLinear):
    """Q, K and V projections for grouped-query, multi-query or multi-head attention.

    Args:
        hidden: h.
        heads: n query heads.
        kv_heads: k KV heads; divides n.
        head_dim: d.
        mesh: its tensor axis, unfolded to (kv shard, kv replica), has max(1, t/k) replicas.
        gated: whether to project a gate of as many elements as Q too.
        options: as for `ColumnParallelLinear`.

    Raises:
        ValueError: invalid tensor degree (the message names the nearest valid ones), or a mesh with other replicas.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        mesh: Mesh,
        *,
        gated: bool = False,
        **options: Unpack[LinearOptions],
    ) -> None:
        degree = mesh.tensor.size
        _check_degree(heads, kv_heads, degree)
        replicas = kv_replicas(kv_heads, degree)
        if mesh.kv_replicas != replicas:
            raise ValueError(
                f"GQAQKVColumnParallelLinear: {kv_heads} KV heads over tensor = {degree} need kv_replicas = {replicas}, "
                f"the mesh has {mesh.kv_replicas}"
            )
        q, kv = heads * head_dim, kv_heads * head_dim
        sizes = {**({"gate": q} if gated else {}), "q": q, "k": kv, "v": kv}
        copies = {"k": replicas, "v": replicas}
        super().__init__(hidden, sizes, mesh.tensor, head_rows=(head_dim,), replicas=copies, **options)
        self.replicas = mesh.kv_replica
        self.heads, self.kv_heads = heads // degree, kv_heads * replicas // degree
        self.query_width = (2 if gated else 1) * self.heads * head_dim  # columns that no other rank has

    def multiply(self, x: Tensor, weight: Tensor, output: Tensor | None) -> Tensor:
        """(b·s, h) or (b·s/t, h) -> (b·s, (n + 2k)·d) with this rank's n and k: its Q heads, then K, then V.

        With gates (b·s, (2n + 2k)·d), the gates first.
        """
        if self.replicas.size == 1:
            return super().multiply(x, weight, output)
        inputs, options = (x, weight, self.bias, self.axis), (self.sequence_parallel, self.products, output)
        return ReplicatedKVLinear.apply(*inputs, self.replicas, self.query_width, *options)


def _check_degree(heads: int, kv_heads: int, degree: int) -> None:
    """Raise ValueError, naming the nearest valid degrees, unless the degree is valid."""
    if heads % kv_heads:
        raise ValueError(f"GQAQKVColumnParallelLinear: {kv_heads} KV heads do not divide {heads} query heads")
    valid = valid_tensor_degrees(heads, kv_heads)
    if degree not in valid:
        below = [t for t in valid if t < degree][-1:]
        above = [t for t in valid if t > degree][:1]
        raise ValueError(
            f"GQAQKVColumnParallelLinear: tensor = {degree} is invalid for {heads} query and {kv_heads} KV heads; "
            f"nearest valid: {', '.join(map(str, below + above))}"
        )
