"""What a training step computes between the model and the optimizer, as functions that a device may want compiled.

On devices that compile each operator at its first use, each is a program; elsewhere torch's kernels run one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from modeling.training.anomalies import WINDOW, decide, record

if TYPE_CHECKING:
    from parallel.optimizer.arithmetic import Compile


class StepFunctions:
    """The functions of this module and those of the anomaly guard, compiled if `compile` is given."""

    def __init__(self, compile: Compile | None = None) -> None:
        self.shard, self.add, self.multiply, self.pack, self.join, self.decide, self.record = (
            compile(function) if compile else function
            for function in (shard, add, multiply, pack, join, decide, record)
        )

    @torch.no_grad()
    def rehearse(
        self,
        samples: Tensor,
        positions: Tensor,
        aligned: tuple[Tensor | None, Tensor | None],
        counts: Sequence[int],
        degree: int,
        spikes: bool,
    ) -> None:
        """Call each function as a step does, so that all of it is compiled.

        Args:
            samples, positions: see `shard`.
            aligned: its documents and answers.
            counts: how many numbers of each kind a rank adds to the statistics.
            degree: see `pack`.
            spikes: whether the guard detects spikes.
        """
        self.shard(samples, positions, *aligned)
        number = torch.zeros((), device=samples.device)
        self.multiply(self.add(number, number), number)
        statistics = self.pack(number, degree, *(number.new_zeros(count) for count in counts))
        self.join(statistics, number, number, number)
        factor, window = 2.0 if spikes else None, number.new_zeros(WINDOW)
        self.decide(number, window, number, factor)
        if spikes:
            slots = torch.arange(WINDOW, device=samples.device)
            self.record(number, number, window, number.clone(), slots)


def shard(
    samples: Tensor, positions: Tensor, documents: Tensor | None, answers: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """A context rank's tokens and targets (m·b, s/c) of samples (m·b, s + 1), and of `documents` and `answers` (m·b, s)."""
    documents, answers = (None if each is None else each[:, positions] for each in (documents, answers))
    return samples[:, positions], samples[:, positions + 1], documents, answers


def add(total: Tensor, loss: Tensor) -> Tensor:
    """Sum of losses so far."""
    return total + loss


def multiply(total: Tensor, scale: Tensor) -> Tensor:
    """A loss in the scale of its gradients."""
    return total * scale


def pack(loss: Tensor, degree: int, *numbers: Tensor) -> Tensor:
    """A rank's statistics, flat, divided by the tensor degree, whose ranks all add the same."""
    return torch.cat((loss[None], *numbers)) / degree


def join(statistics: Tensor, *results: Tensor) -> Tensor:
    """Statistics and results of an update, flat, for one copy to the host."""
    return torch.cat((statistics, torch.stack(results)))
