"""Experts' load in one step, counted by the layers in backward (parallel/experts/balance.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from modeling.training.trainer import Trainer
from parallel.device import upload
from parallel.experts.balance import EXTRA
from profiles.sections.model import Model


@dataclass(frozen=True)
class ExpertLoad:
    """Sums over a step and all ranks."""

    loads: list[list[float]]  # tokens that chose each expert, by layer
    # by layer: dropped choices, balance loss and z-loss, the losses without their coefficients
    dropped: list[float]
    balance_losses: list[float]
    z_losses: list[float]

    @property
    def imbalance(self) -> list[float]:
        """Load of the heaviest expert over the mean, by layer; 1 if balanced."""
        return [max(row) * len(row) / max(sum(row), 1) for row in self.loads]

    def metrics(self) -> dict[str, Any]:
        """Metrics over all layers, and by layer."""
        return {
            "balance_loss": sum(self.balance_losses),
            "router_z_loss": sum(self.z_losses),
            "expert_load_max": max(self.imbalance),
            "dropped_choices": sum(self.dropped),
            "balance_loss_by_layer": self.balance_losses,
            "expert_load_max_by_layer": self.imbalance,
            "dropped_choices_by_layer": self.dropped,
        }


def value_count(model: Model) -> int:
    """Number of values that `take` returns: 0 for a model without experts."""
    return 0 if model.num_experts is None else model.num_layers * (model.num_experts + EXTRA)


def take(trainer: Trainer) -> Tensor:
    """This rank's counts in the step's backward passes, flat on the device; resets them."""
    model = trainer.profile.model
    if model.num_experts is None:
        return torch.empty(0, device=trainer.torch_device)
    counts = {}
    for layer, experts in trainer.experts.items():
        if experts.statistics is not None:
            counts[layer], experts.statistics = experts.statistics, None
    if not counts:
        return upload(torch.zeros(value_count(model)), trainer.torch_device)
    return trainer.functions.to_table([*counts.values()], tuple(counts), model.num_layers)


def read(sums: Sequence[float], layers: int) -> ExpertLoad | None:
    """The load from sums over all ranks; None for a model without experts."""
    if not sums:
        return None
    width = len(sums) // layers
    rows = [list(sums[start : start + width]) for start in range(0, len(sums), width)]
    extra = zip(*(row[-EXTRA:] for row in rows), strict=True)
    return ExpertLoad([row[:-EXTRA] for row in rows], *map(list, extra))
