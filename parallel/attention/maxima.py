"""The largest score of each query head, over its queries and the keys that they see.

QK-clip bounds it (arXiv 2507.20534). Flash attention does not return it, so one more product q kᵀ is computed, in tiles of which
only the maximum is kept: half of attention's products in forward, and no backward. It is plain torch, the same on all devices,
with static shapes, and reads nothing on the host. (FlexAttention of torch 2.13 returns maxima on GPUs only.)

Over a context axis K is gathered: a rank sends B(c-1)/2 bytes, with B those of its K and V. It computes the pairs that it
computes in ring attention (zigzag.py), in an operator that knows the rank. Devices that support no opaque operators compute those
of gathered.py in the graph, which is the same on every rank.

The maximum is that of one rank's tokens in one microbatch. Backward records it, so that evaluation does not count. It leaves a
compiled graph, which has no side effects, as the gradient of an otherwise unused tensor, as experts' statistics do
(experts/balance.py). Eager backward passes that are split compute no such gradient, and record it directly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from parallel import collectives, mesh
from parallel.activation_checkpointing import always_save
from parallel.attention import gathered, tiles
from parallel.attention.kernels import Math
from parallel.attention.tiles import AttentionOptions
from parallel.attention.zigzag import RankAttention
from parallel.mesh import Axis
from parallel.torch_internals import custom_op

# Scores of a tile: on a CPU as many as fit in its cache, on others enough to outlast their launch.
TILES = {"cpu": 1 << 22}
TILE = 1 << 25


def max_scores(
    q: Tensor,
    k: Tensor,
    axis: Axis | None = None,
    *,
    causal: bool = True,
    scale: float | None = None,
    documents: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Largest score of each of this rank's query heads over its queries; arguments as for `attention`.

    Returns:
        (n) float32, without gradient.
    """
    axis = axis or Axis("context")
    options = AttentionOptions(causal, scale, documents, window)
    q, k, scale = q.detach(), k.detach(), options.score_scale(q)
    if axis.graph_kernel is None:
        over = axis.name, axis.size, axis.supports_reduction
        return _max_scores(q, k, documents, *over, causal, scale, window)
    if axis.size > 1:
        found = gathered.max_scores(UNROLLED, q, k, axis, options)
    else:
        pair = None if documents is None else (documents, documents)
        found = tiles.max_scores(UNROLLED, q, k, scale, tiles.Visibility(causal, pair, window))
    return torch.stack([*found]).amax(0).float()


class _Scores(Math):
    """The formulas, in tiles of limited size.

    Args:
        rows: of a tile, at least.
    """

    def __init__(self, rows: int) -> None:
        super().__init__()
        self._rows = rows

    def tile_rows(self, q: Tensor, causal: bool, backward: bool) -> int:
        b, n, s, _ = q.shape
        return min(s, max(self._rows, TILES.get(q.device.type, TILE) // (b * n * s)))

    def scratch_bytes(self, q: Tensor, k: Tensor, causal: bool) -> int:
        b, n, *_ = q.shape
        scores = b * n * self.tile_rows(q, causal, backward=False) * k.shape[2]
        return scores * (q.element_size() + 4)  # in q's dtype and in float32


SCORES = _Scores(64)
# A graph has the operators of each tile: no more tiles than attention by formulas, which has 512 rows in each.
UNROLLED = _Scores(512)


@custom_op("trainshed::max_scores")
def _max_scores(
    q: Tensor,
    k: Tensor,
    documents: Tensor | None,
    axis: str,
    size: int,
    supports_reduction: bool,
    causal: bool,
    scale: float,
    window: int | None,
) -> Tensor:
    """(n) float32."""
    ring = replace(mesh.registered_axis(axis, size), supports_reduction=supports_reduction)
    keys = collectives.all_gather(k, ring).unflatten(0, (size, -1))  # (c, b, k, s/c, d)
    if documents is not None:
        documents = collectives.all_gather(documents, ring).unflatten(0, (size, -1))  # (c, b, s/c)
    rank = RankAttention(ring.rank, size, SCORES, scale, causal, window, documents)
    found = [
        maxima
        for block in rank.blocks(q.shape[2])
        for maxima in rank.max_scores(block, q, keys[block.source])
    ]
    return torch.stack(found).amax(0).float()


@_max_scores.register_fake
def _(q: Tensor, *_: Any) -> Tensor:
    return q.new_empty(q.shape[1], dtype=torch.float32)


always_save(torch.ops.trainshed.max_scores.default)


class ScoreMaxima(nn.Module):
    """Records the largest score of each query head, over the backward passes since they were last taken.

    Args:
        heads: query heads of this rank, n/t.

    Attributes:
        larger: elementwise maximum of two tensors; replaced by a compiled one where operators do not run one by one.
    """

    tally: Tensor

    def __init__(self, heads: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        tally = torch.zeros(heads, device=device, requires_grad=True)
        tally.register_post_accumulate_grad_hook(self._take_gradient)
        self.register_buffer("tally", tally, persistent=False)
        self._largest: Tensor | None = None
        self.larger: Callable[[Tensor, Tensor], Tensor] = larger

    def _take_gradient(self, tally: Tensor) -> None:
        found: Any = tally.grad  # not None, in a hook that runs when it is complete
        tally.grad = None
        self._keep(found)

    def _keep(self, found: Tensor) -> None:
        self._largest = found if self._largest is None else self.larger(self._largest, found)

    def take(self) -> Tensor | None:
        """The largest scores (n/t), float32; None if there was no backward pass. Forgets them."""
        found, self._largest = self._largest, None
        return found

    def forward(self, out: Tensor, q: Tensor, k: Tensor, axis: Axis, **masks: Any) -> Tensor:
        """Return attention's result `out`, and record its scores if it is part of training.

        Other arguments are those of `max_scores`.
        """
        if not torch.is_grad_enabled():
            return out
        found = max_scores(q, k, axis, **masks)
        if torch.compiler.is_compiling():
            return _Record.apply(out, found, self.tally, None)
        return _Record.apply(out, found, None, self._keep)


def larger(a: Tensor, b: Tensor) -> Tensor:
    """Elementwise maximum."""
    return torch.maximum(a, b)


class _Record(Function):
    """Identity of attention's result, whose backward records the maxima.

    It passes them to `keep` or, without it, returns them as the gradient of the tally.
    """

    @staticmethod
    def forward(
        ctx: Any, out: Tensor, maxima: Tensor, tally: Tensor | None, keep: Callable[[Tensor], None] | None
    ) -> Tensor:
        ctx.save_for_backward(maxima)
        ctx.keep = keep
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor | None, None]:
        (maxima,) = ctx.saved_tensors
        if ctx.keep is None:
            return grad, None, maxima, None
        ctx.keep(maxima)
        return grad, None, None, None
