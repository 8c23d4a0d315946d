"""QK-clip in a step: the largest attention logits over all ranks, and the factors of the update.

`models/qk_clip.py` has the rule. One all-reduce over all ranks, of L·n float32 numbers of L layers and n query heads, covers the
microbatches of data ranks, tokens of context ranks, heads of tensor ranks and layers of pipeline stages. Nothing is read on the
host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from modeling.models import qk_clip
from modeling.training.trainer import Trainer
from parallel.collectives import all_reduce_max


@dataclass(frozen=True)
class LogitClip:
    """The largest logits of a step, and the factors of rows that follow; the same on every rank.

    Attributes:
        logits: of each layer and query head, (L, n) float32 on the device.
        row_factors: flat (`models.qk_clip.factors`).
    """

    logits: Tensor
    row_factors: Tensor
    threshold: float

    def results(self, skipped: Tensor) -> tuple[Tensor, Tensor]:
        """The largest logit, and the number of query heads beyond the threshold, 0 in a skipped step."""
        beyond = (self.logits > self.threshold).sum()
        return self.logits.amax(), beyond.where(skipped == 0, 0).float()


@torch.no_grad()
def take(trainer: Trainer) -> LogitClip | None:
    """The largest logits of all ranks since the last call; None without `train.qk_clip`. Collective."""
    profile, threshold = trainer.profile, trainer.profile.train.qk_clip
    if threshold is None:
        return None
    model, tensor = profile.model, trainer.mesh.tensor
    shape = model.num_layers, tensor.size, model.num_attention_heads // tensor.size
    logits = torch.full(shape, -torch.inf, device=trainer.torch_device)
    for number, maxima in trainer.maxima.items():
        if (found := maxima.take()) is not None:
            logits[number, tensor.rank] = found
    logits = all_reduce_max(logits.flatten(1), trainer.mesh.world)
    return LogitClip(logits, qk_clip.factors(logits, threshold, model), threshold)
