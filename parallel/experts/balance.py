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

z-loss: mean over a sample's tokens of log²Σexp(logits) (ST-MoE, arXiv 2202.08906). Losses are summed over layers and averaged
over the step's samples; f has no gradient. Padding has no part in losses and statistics, and N does not count it.

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


def count_choices(indices: Tensor, experts: int, length: int, padding: Tensor | None = None) -> Tensor:
    """Tokens that chose each expert, (b, E) float32 of choices (b·length, k); padding as for `losses`."""
    k = indices.shape[1]
    choices = indices.view(-1, length * k)  # (b, length·k)
    counted = None if padding is None else ~padding[..., None].expand(-1, -1, k).flatten(1)  # (b, length·k)
    if becomes_one_kernel(indices):
        chosen = choices[..., None] == torch.arange(experts, device=indices.device)
        return (chosen if counted is None else chosen & counted[..., None]).sum(1).float()
    counts = torch.zeros(len(choices), experts, device=indices.device)
    ones = torch.ones_like(choices, dtype=torch.float32) if counted is None else counted.float()
    return counts.scatter_add(1, choices, ones)


def losses(
    balance: Balance,
    logits: Tensor,
    scores: Tensor,
    counts: Tensor,
    load: Tensor,
    k: int,
    context: Axis,
    padding: Tensor | None = None,
) -> Tensor:
    """This rank's terms of balance loss and z-loss (2), without coefficients, summed over its samples.

    Args:
        logits, scores: (b·s/c, E) of the router, float32.
        counts: `count_choices`, (b, E).
        load: choices of a sample per expert, (E), mean over the step, for `global`.
        k: experts of a token.
        context: axis that shards the samples.
        padding: (b, s/c), true for padding; None: there is none.
    """
    samples, experts = counts.shape
    length = len(logits) // samples  # s/c
    sequence = length * context.size  # s
    by_sample = balance.kind in ("sequence", "bias")
    # (b, E) over the complete samples
    totals = collectives.all_reduce(counts, context) if by_sample or padding is not None else counts
    squares = logits.logsumexp(-1).square()  # (b·s/c)
    if padding is None:
        z = squares.sum() / sequence
    else:
        z = (squares.view(samples, -1).masked_fill(padding, 0).sum(1) / _tokens(totals, k)[:, 0]).sum()
    if balance.kind == "none":
        return torch.stack((torch.zeros_like(z), z))
    # Sigmoids of very negative logits may all be 0.
    normalized = scores / scores.sum(-1, keepdim=True).clamp(min=1e-20)
    normalized = normalized.view(samples, length, experts)
    counted, covered, factor = totals if by_sample else load[None], 1.0, 1.0  # covered: samples that f counts
    if balance.kind == "batch":
        counted, covered, factor = counts.sum(0, keepdim=True), samples / context.size, k / balance.layers
    tokens: float | Tensor = covered * sequence
    if padding is not None:
        tokens, normalized = _tokens(counted, k), normalized.masked_fill(padding[..., None], 0)
    f = counted.detach() * (experts / (k * tokens))  # (b or 1, E)
    means = normalized.sum(1) / (tokens / covered)  # (b, E), this rank's part of P
    return torch.stack(((f * means).sum() * factor, z))


def _tokens(counts: Tensor, k: int) -> Tensor:
    """Tokens (n, 1) that made the choices counted in (n, E), at least 1."""
    return (counts.sum(1, keepdim=True) / k).clamp(min=1)


class _Record(Function):
    """Identity of weights (T, k); backward also returns the gradients of the losses and the statistics.

    Args of `apply`: weights; losses (2) as from `losses`; tally (E + EXTRA), whose gradient becomes the statistics; bias (E) or
    None, whose gradient becomes the excess load; statistics (E + EXTRA); gradient of the losses; number of all choices, T·k, or
    None if some are of padding.
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
        choices: int | None,
    ) -> Tensor:
        ctx.save_for_backward(statistics, loss_gradient)
        ctx.bias, ctx.k, ctx.choices = bias is not None, weights.shape[1], choices
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        statistics, loss_gradient = ctx.saved_tensors
        excess = _excess(statistics[:-EXTRA], ctx.k, ctx.choices) if ctx.bias else None
        return grad, loss_gradient, statistics, excess, None, None, None


def _excess(loads: Tensor, k: int, choices: int | None) -> Tensor:
    """Load of each expert beyond an equal share, scaled to integers.

    Sums of integers are exact in any order of ranks, so no sign depends on rounding.

    Args:
        choices: sum of the loads, a multiple of k; None if it is only known on the device.
    """
    common = math.gcd(len(loads), k if choices is None else choices)
    return loads * (len(loads) // common) - (loads.sum() / common if choices is None else choices // common)


def record(
    balance: Balance,
    weights: Tensor,
    losses: Tensor,
    tally: Tensor,
    bias: Tensor | None,
    loads: Tensor,
    dropped: Tensor,
    tensor: int,
    padded: bool = False,
) -> Tensor:
    """Attach losses and statistics to the weights (T, k) of the chosen experts.

    Args:
        losses: this rank's terms, summed over samples (`losses`).
        tally: (E + EXTRA), requires a gradient.
        bias: of the selection, (E); None without one.
        loads: tokens that chose each expert, (E).
        dropped: choices beyond the capacity of their experts, 0-dim.
        tensor: number of tensor ranks, each of which contributes an equal part of the gradient.
        padded: whether some of the T tokens may be padding, whose choices are not in `loads`.
    """
    per_step = losses / balance.samples
    statistics = torch.cat((loads, dropped.view(1).float(), per_step.detach()))
    coefficients = (balance.coefficient, balance.z_coefficient)
    gradient = torch.stack([losses.new_full((), c / (balance.samples * tensor)) for c in coefficients])
    choices = None if padded else weights.numel()
    return _Record.apply(weights, losses, tally, bias, statistics, gradient, choices)
