"""Losses of preference pairs, from the log-probabilities of their tokens: DPO (arXiv 2305.18290) and ORPO (2403.07691).

With log π(y) = Σ log p over an answer's tokens, y⁺ chosen and y⁻ rejected, and the reference model's ρ:

    r = log π(y) - log ρ(y)      Δ = r⁺ - r⁻
    sigmoid    -(1 - ε) log σ(βΔ) - ε log σ(-βΔ)       with label smoothing ε (cDPO)
    hinge      max(0, 1 - βΔ)
    ipo        (Δ̄ - 1/2β)², where Δ̄ is of the means over each answer's tokens (arXiv 2310.12036)
    orpo       NLL(prompt, y⁺) - β log σ(log odds(y⁺) - log odds(y⁻)), odds of the means over each answer's tokens

The loss is a function of all of a pair's tokens, while the cross-entropy of the vocabulary is fused with the output projection
(parallel/loss.py). So it is computed twice: without gradient for the log-probabilities, and once the loss's derivative by each of
them is known, as a cross-entropy in which each token has this weight. Cost: one more forward product of the head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel import collectives
from parallel.mesh import Axis
from profiles.objectives import PAIR_METRICS
from profiles.schema import Objective

METRICS = PAIR_METRICS


class Answers(NamedTuple):
    """What the loss of m pairs is a function of; chosen and rejected rows alternate."""

    log_probabilities: Tensor  # (2m, s/c) of the tokens that follow, float32; 0 where there is none
    answer: Tensor  # (2m, s/c) whether the token is of an answer
    reference: Tensor  # (2m) log ρ of the answers; zeros without a reference


def row_sums(values: Tensor, context: Axis) -> Tensor:
    """Sums (rows) over the sequence of values (rows, s/c), whose gradient is each rank's own."""
    local = values.sum(1)
    return local + (collectives.all_reduce(local.detach(), context) - local.detach())


def pair_losses(objective: Objective, answers: Answers, context: Axis, nll_weight: float = 0.0) -> Tensor:
    """Loss of the pairs and the METRICS: sums (1 + metrics) over the pairs that have answers.

    Args:
        nll_weight: orpo: weight of a token in the sum of NLLs, in pairs per token.
    """
    logs, mask = answers.log_probabilities, answers.answer
    total = row_sums(logs.where(mask, 0), context)  # (2m)
    lengths = collectives.all_reduce(mask.sum(1).float(), context).clamp(min=1)
    ratios = total - answers.reference
    present = collectives.all_reduce(mask.sum(1).float(), context)[::2] > 0  # (m)
    delta = ratios[::2] - ratios[1::2]
    beta = objective.beta
    reward = beta * delta
    nll = logs.new_zeros(())
    if objective.kind == "orpo":
        mean = total / lengths
        odds = mean - torch.log1p(-mean.exp().clamp(max=1 - 1e-7))
        losses = -beta * F.logsigmoid(odds[::2] - odds[1::2])
        nll = -row_sums(logs, context)[::2].where(present, 0).sum() * nll_weight
        reward = beta * (mean[::2] - mean[1::2])
    elif objective.loss == "sigmoid":
        smoothing = objective.label_smoothing
        losses = -(1 - smoothing) * F.logsigmoid(reward) - smoothing * F.logsigmoid(-reward)
    elif objective.loss == "hinge":
        losses = F.relu(1 - reward)
    else:
        means = ratios / lengths
        losses = (means[::2] - means[1::2] - 1 / (2 * beta)).square()
    kl = (ratios[::2] + ratios[1::2]) / 2
    columns = torch.stack((losses, (reward > 0).float(), reward, kl), 1)  # (m, 1 + metrics)
    sums = columns.where(present[:, None], 0).sum(0)
    return torch.cat((sums[:1] + nll, sums[1:].detach()))
