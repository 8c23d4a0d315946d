"""Multi-token prediction in training: its tokens and targets, its loss, and the weight of that loss.

    loss = cross-entropy + λ / D · Σ over distances k of the cross-entropy of module k

all divided by the number of the model's targets, as in arXiv 2412.19437, section 2.2: a module has fewer targets, because there
is none beyond the end of a sample. With document masks, a module predicts only within the document that a token belongs to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from modeling.models.language_model import LanguageModel
from modeling.training.outputs import Output
from modeling.training.step_functions import input_ids
from parallel.loss import IGNORE_INDEX
from profiles.schema import Train


def shard(
    samples: Tensor, positions: Tensor, documents: Tensor | None, targets: Tensor, depth: int
) -> tuple[Tensor, Tensor]:
    """A context rank's inputs of `depth` modules, from samples (m·b, s + 1).

    Args:
        documents: (m·b, s); the last token of a sample belongs to the document of the one before it.
        targets: (m·b, s/c) of the model.

    Returns:
        The tokens at distances 1 to D from each (m·b, D, s/c), any token beyond a sample's end, and the targets of the model and
        of each module, side by side (m·b, (1 + D)·s/c).
    """
    end = samples.shape[1] - 1
    following, found = [], [targets]
    for distance in range(1, depth + 1):
        following.append(input_ids(samples[:, (positions + distance).clamp(max=end)]))
        at = positions + distance + 1
        wanted = samples[:, at.clamp(max=end)]
        counted = (wanted >= 0) & (at <= end)
        if documents is not None:
            counted &= documents[:, at.clamp(max=end - 1)] == documents[:, positions]
        found.append(wanted.where(counted, IGNORE_INDEX))
    return torch.stack(following, 1), torch.cat(found, 1)


@dataclass
class MultiTokenLoss:
    """Loss with the gradient of multi-token prediction; in evaluation [loss, *metrics, *modules].

    Args:
        own: the loss of the model's own prediction.
        weight: λ, 0-dim; None in evaluation.

    Attributes:
        sums: (D) losses of the modules, summed over the microbatches of a step; None before the first.
    """

    own: Output
    weight: Tensor | None
    sums: Tensor | None = None

    def __call__(self, stage: LanguageModel, x: Tensor, targets: Tensor) -> Tensor:
        parts = 1 + len(stage.ahead)
        (states, *further), (wanted, *later) = x.chunk(parts), targets.chunk(parts, 1)
        loss = self.own(stage, states, wanted)
        modules = torch.stack([stage.loss(*each) for each in zip(further, later, strict=True)])
        if self.weight is None:
            return torch.cat((loss.flatten(), modules))
        self.sums = modules.detach() if self.sums is None else self.sums + modules.detach()
        added = self.weight * modules.mean()
        return loss + (added - added.detach())


def metrics(losses: Sequence[float]) -> dict[str, Any]:
    """Metrics of a step, from the modules' losses; none without modules."""
    return {"mtp_loss": sum(losses) / len(losses), "mtp_loss_by_depth": [*losses]} if losses else {}


def weight(settings: Train, step: int) -> float:
    """λ in a step; the first is 1."""
    later = settings.mtp_steps is not None and step > settings.mtp_steps
    return settings.mtp_later_weight or 0.0 if later else settings.mtp_weight
