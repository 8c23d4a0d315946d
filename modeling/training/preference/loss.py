"""Losses of preference pairs from token log-probabilities: DPO (arXiv 2305.18290), ORPO (2403.07691).

With log π(y) = Σ log p over an answer's tokens, y⁺ chosen and y⁻ rejected, and the reference model's ρ:

    r = log π(y) - log ρ(y)      Δ = r⁺ - r⁻
    sigmoid    -(1 - ε) log σ(βΔ) - ε log σ(-βΔ)       with label smoothing ε (cDPO)
    hinge      max(0, 1 - βΔ)
    ipo        (Δ̄ - 1/2β)², with Δ̄ of means over each answer's tokens (arXiv 2310.12036)
    orpo       NLL(prompt, y⁺) - β log σ(log odds(y⁺) - log odds(y⁻)), with odds of means over each answer's tokens

The loss is a function of all of a pair's tokens, while the cross-entropy of the vocabulary is fused with the output projection
(parallel/loss.py). So the cross-entropy is computed twice: without gradient for the log-probabilities, and again, weighting each
token by the loss's derivative with respect to its log-probability. Cost: one more forward product of the head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from modeling.data.records import PADDING
from parallel import collectives
from parallel.loss import IGNORE_INDEX
from parallel.mesh import Axis


class Answers(NamedTuple):
    """Inputs of the loss of m samples of pairs; rows of chosen and of rejected answers alternate."""

    log_probabilities: Tensor  # (2m, s/c) of the next tokens, float32; 0 where there is none
    answer: Tensor  # (2m, s/c) whether the token belongs to an answer
    reference: Tensor  # (2m, a) log ρ of each row's answers; zeros without a reference
    # (2m, s/c) index in its row of each token's answer, negative if it has none; None: a is 1
    numbers: Tensor | None = None


class LossSettings(NamedTuple):
    """What the loss of pairs depends on, of `objective`; constants of a compiled loss."""

    odds_ratio: bool  # ORPO's loss, else `loss`
    loss: str
    beta: float
    label_smoothing: float


def split_targets(
    targets: Tensor, length: int, prompts: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Split the targets of a microbatch into their parts.

    Args:
        targets: (2b, s/c + 1) or (2b, 2·s/c + 1) from `step_functions.shard`: the next tokens, the numbers of their answers if
            pairs are packed, and the row's number in the step.
        length: s/c.
        prompts: whether the loss counts the tokens of prompts too.

    Returns:
        (2b, s/c) ids of counted tokens, else IGNORE_INDEX; (2b, s/c) whether they belong to an answer; (2b, s/c) numbers of
        answers or None; (2b) numbers of rows.
    """
    (following, *numbers), rows = targets[:, :-1].split(length, 1), targets[:, -1]
    answer = counted = following >= 0
    if prompts:
        counted = numbers[0] >= 0 if numbers else following != PADDING
    wanted = following.where(answer, ~following).where(counted, IGNORE_INDEX)
    return wanted, answer, numbers[0] if numbers else None, rows


def log_probabilities(losses: Tensor, numbers: Tensor | None, width: int) -> Tensor:
    """log π (rows, a) of this rank's tokens of each answer, from their losses (rows, s/c)."""
    return answer_sums(-losses, numbers, width)


def score_pairs(
    settings: LossSettings,
    losses: Tensor,
    answer: Tensor,
    numbers: Tensor | None,
    rows: Tensor,
    reference: Tensor | None,
    width: int,
    context: Axis,
    nll_weight: Tensor,
    training: bool,
) -> tuple[Tensor, Tensor | None]:
    """This context rank's equal share of `pair_losses`' sums; in training also the weights of tokens.

    Args:
        losses: (2b, s/c) of tokens.
        answer, numbers, rows: from `split_targets`.
        reference: log ρ of the answers of all of a step's rows; None: 0.
        width: answers per row.

    Returns:
        sums (2 + metrics), and weights (2b, s/c): the sum of token losses weighted by them has the gradient of the pairs' loss.
    """
    reference = losses.new_zeros(len(rows), width) if reference is None else reference[rows]

    def sums(losses: Tensor) -> tuple[Tensor, Tensor]:
        found = pair_losses(settings, Answers(-losses, answer, reference, numbers), context, nll_weight)
        return found[1], found

    if not training:
        return sums(losses)[1] / context.size, None
    weights, found = torch.func.grad(sums, has_aux=True)(losses)
    return found / context.size, weights


def with_value(weighted: Tensor, sums: Tensor) -> Tensor:
    """A tensor with the value of the pairs' loss and the gradient of the weighted sum of token losses."""
    return weighted + (sums[1] - weighted).detach()


def concatenate(parts: Sequence[Tensor]) -> Tensor:
    """Rows of all microbatches."""
    return torch.cat([*parts])


def answer_sums(values: Tensor, numbers: Tensor | None, width: int) -> Tensor:
    """Sums (rows, a) of values (rows, s/c) over this rank's tokens of each answer; `width` is a."""
    if numbers is None:
        return values.sum(1, keepdim=True)
    rows = torch.arange(len(values), device=values.device)[:, None] * width
    indices, values = (rows + numbers.clamp(min=0)).flatten(), values.where(numbers >= 0, 0).flatten()
    # Flat, because in one dimension index_add has a deterministic kernel on GPUs.
    return values.new_zeros(len(rows) * width).index_add(0, indices, values).view(-1, width)


def pair_losses(settings: LossSettings, answers: Answers, context: Axis, nll_weight: Tensor) -> Tensor:
    """Number of pairs, their loss and PAIR_METRICS: sums (2 + metrics) over the pairs that have answers.

    Args:
        nll_weight: 0-dim, weight of a token in the sum of NLLs, in pairs per token; used for orpo only.
    """

    def sums(values: Tensor) -> Tensor:
        """Sums (2m, a) over the complete sequence, whose gradient covers this rank's tokens only."""
        local = answer_sums(values, answers.numbers, answers.reference.shape[1])
        return local + (collectives.all_reduce(local.detach(), context) - local.detach())

    logs, mask = answers.log_probabilities, answers.answer
    total = sums(logs.where(mask, 0))  # (2m, a)
    lengths = sums(mask.float())
    ratios = total - answers.reference
    present = lengths[::2] > 0  # (m, a)
    lengths = lengths.clamp(min=1)
    delta = ratios[::2] - ratios[1::2]
    beta = settings.beta
    reward = beta * delta
    nll = logs.new_zeros(())
    if settings.odds_ratio:
        mean = total / lengths
        odds = mean - torch.log1p(-mean.exp().clamp(max=1 - 1e-7))
        losses = -beta * F.logsigmoid(odds[::2] - odds[1::2])
        nll = -sums(logs)[::2].where(present, 0).sum() * nll_weight
        reward = beta * (mean[::2] - mean[1::2])
    elif settings.loss == "sigmoid":
        smoothing = settings.label_smoothing
        losses = -(1 - smoothing) * F.logsigmoid(reward) - smoothing * F.logsigmoid(-reward)
    elif settings.loss == "hinge":
        losses = F.relu(1 - reward)
    else:
        means = ratios / lengths
        losses = (means[::2] - means[1::2] - 1 / (2 * beta)).square()
    kl = (ratios[::2] + ratios[1::2]) / 2
    columns = torch.stack((losses, (reward > 0).float(), reward, kl))  # (1 + metrics, m, a)
    loss, *metrics = columns.where(present, 0).sum((1, 2))
    return torch.stack((present.sum().to(loss.dtype), loss + nll, *(metric.detach() for metric in metrics)))
