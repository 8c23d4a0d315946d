"""Load balancing of experts: auxiliary losses of the router, and statistics of a step.

With f_i = E/(k·N) · (tokens of N that chose expert i), P_i the mean over the N tokens of expert i's normalized score:

    L = Σ_i f_i P_i        1 if balanced (Switch Transformer, arXiv 2101.03961)

    kind       N: the tokens that f and P are statistics of
    sequence   a sample, even if context ranks share it: the same at any microbatch size and topology (arXiv 2412.19437)
    global     all of a step's tokens, whose choices a forward pass before the step counts (arXiv 2501.11873)
    batch      a microbatch of one rank, and L times k, averaged over layers: for one layer Hugging Face's loss. It depends on
               the microbatch size and on the topology
    bias       a sample; the coefficient is 0 unless given, because the router's selection bias balances the load instead: it
               moves against the excess load of the whole step (arXiv 2408.15664)
    none       none

z-loss: mean over tokens of log²Σexp(logits) (ST-MoE, arXiv 2202.08906). Losses are summed over layers and averaged over the
step's samples; f has no gradient.

Statistics are returned as the gradient of an otherwise unused tensor, the `tally`, so that recomputation does not count twice,
evaluation does not count at all, microbatches add up, and compiled graphs have no side effects.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from parallel import collectives
from parallel.device import becomes_one_kernel
from parallel.mesh import Axis

EXTRA = 3  # entries of a tally after the loads of the experts: dropped choices, balance loss, z-loss


@dataclass(frozen=True)
class Balance:
    """How a run balances its experts.

    Attributes:
        kind: of the table above.
        coefficient: of the balance loss.
        z_coefficient: of the z-loss.
        samples: of a step over all ranks, over which losses are averaged.
        layers: of the model, for `batch`.
    """

    kind: str = "none"
    coefficient: float = 0.0
    z_coefficient: float = 0.0
    samples: int = 1
    layers: int = 1


def count_choices(indices: Tensor, experts: int, length: int) -> Tensor:
    """Tokens that chose each expert, (b, E) float32 of choices (b·length, k)."""
    choices = indices.view(-1, length * indices.shape[1])  # (b, length·k)
    if becomes_one_kernel(indices):
        numbers = torch.arange(experts, device=indices.device)
        return (choices[..., None] == numbers).sum(1).float()
    counts = torch.zeros(len(choices), experts, device=indices.device)
    return counts.scatter_add(1, choices, torch.ones_like(choices, dtype=torch.float32))


def losses(
    balance: Balance, logits: Tensor, scores: Tensor, counts: Tensor, load: Tensor, k: int, context: Axis
) -> Tensor:
    """This rank's terms of balance loss and z-loss (2), without coefficients, summed over its samples.

    Args:
        logits, scores: (b·s/c, E) of the router, float32.
        counts: `count_choices`, (b, E).
        load: share of all choices of the step, (E), for `global`.
        k: experts of a token.
        context: axis that shards the samples.
    """
    samples, experts = counts.shape
    length = len(logits) // samples  # s/c
    sequence = length * context.size  # s
    z = logits.logsumexp(-1).square().sum() / sequence
    if balance.kind == "none":
        return torch.stack((torch.zeros_like(z), z))
    # Sigmoids of very negative logits may all be 0.
    normalized = scores / scores.sum(-1, keepdim=True).clamp(min=1e-20)
    if balance.kind == "batch":
        counted, tokens, share = counts.sum(0, keepdim=True), len(logits), k / balance.layers
    elif balance.kind in ("sequence", "bias"):
        counted, tokens, share = collectives.all_reduce(counts, context), sequence, 1.0
    else:
        counted, tokens, share = load[None] * k, 1, 1.0
    f = counted.detach() * (experts / (k * tokens))  # (b or 1, E)
    means = normalized.view(samples, length, experts).sum(1) / sequence  # (b, E), this rank's part of P
    return torch.stack(((f * means).sum() * share, z))


class _Record(Function):
    """Identity of weights (T, k); backward also returns the gradients of the losses and the statistics.

    Args of `apply`: weights; losses (2) as from `losses`; tally (E + EXTRA), whose gradient becomes the statistics; bias (E) or
    None, whose gradient becomes the excess load; statistics (E + EXTRA); gradient of the losses; number of all choices, T·k.
    """

    @staticmethod
    def forward(
        ctx: Any,
        weights: Tensor,
        losses: Tensor,
        tally: Tensor,
        bias: Tensor | None,
        statistics: Tensor,
        loss_gradient: Tensor,
        choices: int,
    ) -> Tensor:
        ctx.save_for_backward(statistics, loss_gradient)
        ctx.bias, ctx.choices = bias is not None, choices
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        statistics, loss_gradient = ctx.saved_tensors
        excess = _excess(statistics[:-EXTRA], ctx.choices) if ctx.bias else None
        return grad, loss_gradient, statistics, excess, None, None, None


def _excess(loads: Tensor, choices: int) -> Tensor:
    """Load of each expert beyond an equal share, scaled to integers.

    Sums of integers are exact in any order of ranks, so no sign depends on rounding.
    """
    common = math.gcd(len(loads), choices)
    return loads * (len(loads) // common) - choices // common


def record(
    balance: Balance,
    weights: Tensor,
    losses: Tensor,
    tally: Tensor,
    bias: Tensor | None,
    loads: Tensor,
    dropped: Tensor,
    tensor: int,
) -> Tensor:
    """Attach losses and statistics to the weights (T, k) of the chosen experts.

    Args:
        losses: this rank's terms, summed over samples (`losses`).
        tally: (E + EXTRA), requires a gradient.
        bias: of the selection, (E); None without one.
        loads: tokens that chose each expert, (E).
        dropped: choices beyond the capacity of their experts, 0-dim.
        tensor: number of tensor ranks, each of which contributes an equal part of the gradient.
    """
    per_step = losses / balance.samples
    statistics = torch.cat((loads, dropped.view(1).float(), per_step.detach()))
    coefficients = (balance.coefficient, balance.z_coefficient)
    gradient = torch.stack([losses.new_full((), c / (balance.samples * tensor)) for c in coefficients])
    return _Record.apply(weights, losses, tally, bias, statistics, gradient, weights.numel())
