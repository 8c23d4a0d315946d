"""Records of one training step: statistics reduced over ranks, and timings.

All numbers that ranks exchange after backward travel in one all-reduce of 3 + (graph counts) + (world size) doubles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from modeling.supervision.stragglers import one_hot
from modeling.training.trainer import Trainer


@dataclass(frozen=True)
class StepStatistics:
    """Sums over all ranks after backward; identical on every rank, which therefore decide alike."""

    loss: float  # mean loss per token of the global batch
    stop_requests: float  # number of ranks that received a stop signal
    checkpoint_writers: float  # number of ranks still writing a checkpoint
    graph_counts: list[float]  # compile cache statistics, see modeling/compilation/graph_cache.py
    rank_seconds: list[float]  # compute time of each rank, without waiting for others, in order of rank

    @classmethod
    def reduce(cls, trainer: Trainer, loss: float, stop: bool, writing: bool, seconds: float) -> Self:
        """Sum this rank's numbers over all ranks in one all-reduce."""
        mesh = trainer.mesh
        numbers = torch.tensor([loss, stop, writing], dtype=torch.float64)
        counts = trainer.compile_statistics.local_counts()
        # Trainer.sum divides by the tensor degree, which only numbers equal on all tensor ranks cancel out.
        rank_seconds = one_hot(mesh.rank, mesh.size, seconds * mesh.tensor.size)
        loss, stops, writers, *rest = trainer.sum(torch.cat((numbers, counts, rank_seconds)))
        return cls(loss, stops, writers, rest[: len(counts)], rest[len(counts) :])


@dataclass(frozen=True)
class StepTimings:
    """Wall-clock seconds of a step and its parts on this rank."""

    total: float
    data_wait: float
    forward_backward: float
    optimizer: float
    communication: float


@dataclass(frozen=True)
class StepRecord:
    """A finished step; `skip_reason` is empty if the weights were updated."""

    step: int
    statistics: StepStatistics
    learning_rate: float
    gradient_norm: float
    parameter_norm: float
    skip_reason: str
    timings: StepTimings
