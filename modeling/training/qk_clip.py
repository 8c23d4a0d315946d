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
from parallel.device import upload


@dataclass(frozen=True)
class LogitClip:
    """The largest logits of a step, and what follows from them; the same on every rank, on the device.

    Attributes:
        logits: of each layer and query head, (L, n) float32.
        row_factors: flat (`models.qk_clip.factors`).
        results: the largest logit, and the number of query heads beyond the threshold.
    """

    logits: Tensor
    row_factors: Tensor
    results: tuple[Tensor, Tensor]


@torch.no_grad()
def take(trainer: Trainer) -> LogitClip | None:
    """The largest logits of all ranks since the last call; None without `train.qk_clip`. Collective."""
    profile, threshold = trainer.profile, trainer.profile.train.qk_clip
    if threshold is None:
        return None
    model, functions = profile.model, trainer.functions
    taken = ((number, maxima.take()) for number, maxima in trainer.maxima.items())
    found = {number: largest for number, largest in taken if largest is not None}
    layers, heads = model.num_layers, model.num_attention_heads
    if found:
        logits = functions.logit_table([*found.values()], tuple(found), layers, trainer.mesh.tensor)
    else:
        logits = upload(torch.full((layers, heads), -torch.inf), trainer.torch_device)
    logits = all_reduce_max(logits, trainer.mesh.world)
    factors, *results = functions.clip_logits(logits, threshold, qk_clip.key_heads(model))
    return LogitClip(logits, factors, (results[0], results[1]))
