"""Router: the k of E experts that a token is sent to, and their weights; float32.

    logits = W x + b;   scores = softmax(logits) or sigmoid(logits)
    chosen = top-k of scores, or of scores + selection bias
    weights = scale · scores[chosen], divided by their sum if `normalize`

Normalized softmax scores are the softmax of the chosen logits, as some families define them. With groups of experts, a token
chooses among the experts of its best groups only; a group's score is the sum of its two best (arXiv 2412.19437).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel.device import becomes_one_kernel
from parallel.initialization import Constant
from parallel.layout import Initializer, Layout, Placement, Section, layout_of, parameter
from parallel.mesh import Axis


@dataclass(frozen=True)
class Routing:
    """How a family routes tokens."""

    experts: int  # E
    top_k: int  # k
    score: str = "softmax"  # or "sigmoid"
    normalize: bool = True  # whether a token's weights sum to `scale`
    scale: float = 1.0
    bias: bool = False  # whether the logits have a bias
    groups: int = 1  # of consecutive experts
    top_groups: int = 1  # groups that a token chooses among
    selection_bias: bool = False  # whether to select by scores plus a bias, which does not affect the weights


class Routed(NamedTuple):
    """Result of a router for T tokens."""

    weights: Tensor  # (T, k) float32
    indices: Tensor  # (T, k) chosen experts
    logits: Tensor  # (T, E) float32
    scores: Tensor  # (T, E) float32


class Router(nn.Module):
    """The router of a layer, for all of a rank's tokens.

    With several tensor ranks, experts' outputs are partial sums, and so are the router's gradients.

    Args:
        hidden: h.
        axis: tensor axis.
    """

    def __init__(
        self,
        hidden: int,
        routing: Routing,
        axis: Axis,
        *,
        initializer: Initializer,
        **placed: Unpack[Placement],
    ) -> None:
        super().__init__()
        self.routing = routing
        partial = ("tensor",) if axis.size > 1 else ()
        weight = Layout((Section("", (routing.experts, hidden), None),), axis.size, initializer, partial)
        self.weight = parameter(weight, **placed)
        self.bias = self.selection_bias = None
        section, zero = Section("", (routing.experts,), None), Constant(0.0)
        if routing.bias:
            self.bias = parameter(Layout((section,), axis.size, zero, partial), **placed)
        if routing.selection_bias:
            # float32 in any training dtype, because its steps are small. Every tensor rank counts the full load.
            self.selection_bias = parameter(
                Layout((section,), axis.size, zero, sign_step=0.0), torch.float32, placed.get("device")
            )

    def move_selection_bias(self, step: float) -> None:
        """Balance the load by the selection bias, which each optimizer step updates (arXiv 2408.15664).

        An expert's bias moves by `step` against the sign of its excess load in the whole step. Call this before the optimizer is
        created; without it the bias does not change.
        """
        bias: Any = self.selection_bias
        bias.global_layout = replace(layout_of(bias), sign_step=step)

    def forward(self, x: Tensor, route: Callable[[Tensor], Tensor] | None = None) -> Routed:
        """x (T, h); `route` gets the chosen experts (T, k) and returns those to use."""
        routing = self.routing
        bias = None if self.bias is None else self.bias.float()
        logits = F.linear(x.float(), self.weight.float(), bias)  # (T, E)
        scores = logits.softmax(-1) if routing.score == "softmax" else logits.sigmoid()
        selected = scores.detach()
        if self.selection_bias is not None:
            selected = selected + self.selection_bias.detach()
        if routing.top_groups < routing.groups:
            selected = _within_best_groups(selected, routing.groups, routing.top_groups)
        indices = selected.topk(routing.top_k, sorted=True).indices  # (T, k)
        indices = indices if route is None else route(indices)
        weights = _choose(scores, indices)
        if routing.normalize:
            # Sigmoids of very negative logits may all be 0.
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-20)
        return Routed(weights * routing.scale if routing.scale != 1 else weights, indices, logits, scores)


def _choose(scores: Tensor, indices: Tensor) -> Tensor:
    """Each token's scores (T, E) of its experts (T, k)."""
    if becomes_one_kernel(scores):
        numbers = torch.arange(scores.shape[1], device=scores.device)
        return scores[:, None].where(indices[..., None] == numbers, 0).sum(-1)
    return scores.gather(1, indices)


def _within_best_groups(selected: Tensor, groups: int, top: int) -> Tensor:
    """Scores (T, E) with -inf for the experts of all but a token's `top` best groups."""
    grouped = selected.unflatten(1, (groups, -1))  # (T, groups, E/groups)
    # Neuron's compiler has topk in two dims only.
    highest = grouped.flatten(0, 1).topk(2).values.sum(-1)  # (T·groups)
    best = highest.view(-1, groups).topk(top).indices  # (T, top)
    kept = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(1, best, True)  # (T, groups)
    return grouped.masked_fill(~kept[..., None], -torch.inf).flatten(1)
