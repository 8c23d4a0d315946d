"""Router: which k of the E experts a token goes to, and with which weights; float32.

    logits = W x + b;   scores = softmax(logits) or sigmoid(logits)
    chosen = top-k of scores, or of scores + selection bias
    weights = scale · scores[chosen], divided by their sum if `normalize`

Normalized softmax scores are the softmax of the chosen logits, as some families define them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel.initialization import Constant
from parallel.layout import Initializer, Layout, Section, parameter
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
    # step of a bias that takes part in the selection only and moves, after each optimizer step, against the sign of its expert's
    # excess load in the whole step: balance without a loss (arXiv 2408.15664); None: no such bias
    selection_step: float | None = None


class Routed(NamedTuple):
    """Result of a router for T tokens."""

    weights: Tensor  # (T, k) float32
    indices: Tensor  # (T, k) chosen experts
    logits: Tensor  # (T, E) float32
    scores: Tensor  # (T, E) float32


class Router(nn.Module):
    """The router of a layer, on all of a rank's tokens.

    On several tensor ranks the outputs of a token's experts are partial sums, hence the router's gradients too.

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
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.routing = routing
        partial = ("tensor",) if axis.size > 1 else ()
        weight = Layout((Section("", (routing.experts, hidden), None),), axis.size, initializer, partial)
        self.weight = parameter(weight, dtype, device)
        self.bias = self.selection_bias = None
        section, zero = Section("", (routing.experts,), None), Constant(0.0)
        if routing.bias:
            self.bias = parameter(Layout((section,), axis.size, zero, partial), dtype, device)
        if routing.selection_step is not None:
            # float32 in any training dtype, because its steps are small. Every tensor rank counts the whole load.
            layout = Layout((section,), axis.size, zero, sign_step=routing.selection_step)
            self.selection_bias = parameter(layout, torch.float32, device)

    def forward(self, x: Tensor) -> Routed:
        """x (T, h)."""
        routing = self.routing
        bias = None if self.bias is None else self.bias.float()
        logits = F.linear(x.float(), self.weight.float(), bias)  # (T, E)
        scores = logits.softmax(-1) if routing.score == "softmax" else logits.sigmoid()
        selected = (
            scores.detach() if self.selection_bias is None else scores.detach() + self.selection_bias.detach()
        )
        indices = selected.topk(routing.top_k, sorted=True).indices  # (T, k)
        weights = scores.gather(1, indices)
        if routing.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return Routed(weights * routing.scale if routing.scale != 1 else weights, indices, logits, scores)
