"""One training step: statistics reduced over ranks, QK-clip's factors, and timings.

All numbers that ranks exchange after backward are in one all-reduce of 4 + (graph counts) + (world size) float32 numbers,
plus 3 + (experts) for each layer of a model with experts, and 1 for each module for multi-token prediction. They stay on the
device, where the anomaly guard and the optimizer use them; the host reads them, and the norms, one step later: in one copy once
the next step's forward and backward are queued, so that it never waits for a device with nothing left to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from modeling.models import qk_clip
from modeling.training.trainer import Trainer
from parallel.collectives import all_reduce, all_reduce_max
from parallel.device import Download, Mark, upload
from parallel.experts.balance import EXTRA
from profiles.sections.model import Model


@dataclass(frozen=True)
class ExpertLoad:
    """Experts' load in a step (parallel/experts/balance.py): sums over backward passes and all ranks."""

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
        return {
            "balance_loss": sum(self.balance_losses),
            "router_z_loss": sum(self.z_losses),
            "expert_load_max": max(self.imbalance),
            "dropped_choices": sum(self.dropped),
            "balance_loss_by_layer": self.balance_losses,
            "expert_load_max_by_layer": self.imbalance,
            "dropped_choices_by_layer": self.dropped,
        }


@dataclass(frozen=True)
class StepStatistics:
    """Sums over ranks after backward, and results of the update; identical, so all ranks decide alike."""

    loss: float  # mean loss per token of the global batch
    stop_requests: float  # number of ranks that received a stop signal
    checkpoint_writers: float  # number of ranks still writing a checkpoint
    graph_counts: list[float]  # compile cache statistics, see modeling/compilation/graph_cache.py
    rank_seconds: list[float]  # compute time of each rank in its last finished step, in order of rank
    differing: float  # above 0 if copies of a weight on several ranks differ
    gradient_norm: float
    parameter_norm: float
    skipped: bool
    experts: ExpertLoad | None = None  # None: the model has none
    module_losses: Sequence[float] = ()  # of multi-token prediction, like `loss`
    max_logit: float | None = None  # with QK-clip
    clipped_heads: int | None = None  # with QK-clip: query heads whose largest logit was beyond the threshold


def load_size(model: Model) -> int:
    """Number of values that `take_expert_load` returns: 0 for a model without experts."""
    return 0 if model.num_experts is None else model.num_layers * (model.num_experts + EXTRA)


def take_expert_load(trainer: Trainer) -> Tensor:
    """This rank's counts in the step's backward passes, flat on the device; resets them."""
    model = trainer.profile.model
    if model.num_experts is None:
        return torch.empty(0, device=trainer.torch_device)
    counts = {}
    for layer, experts in trainer.experts.items():
        if experts.statistics is not None:
            counts[layer], experts.statistics = experts.statistics, None
    if not counts:
        return upload(torch.zeros(load_size(model)), trainer.torch_device)
    return trainer.functions.to_table([*counts.values()], tuple(counts), model.num_layers)


def read_expert_load(sums: Sequence[float], layers: int) -> ExpertLoad | None:
    """The load from sums over all ranks; None for a model without experts."""
    if not sums:
        return None
    width = len(sums) // layers
    rows = [list(sums[start : start + width]) for start in range(0, len(sums), width)]
    extra = zip(*(row[-EXTRA:] for row in rows), strict=True)
    return ExpertLoad([row[:-EXTRA] for row in rows], *map(list, extra))


def reduce_statistics(
    trainer: Trainer, loss: Tensor, stop: bool, writing: bool, seconds: float, differing: Tensor
) -> Tensor:
    """Sum the statistics up to `differing`, load of experts and losses of modules over all ranks.

    Args:
        differing: `ReplicaCheck.count`.

    Returns:
        flat, on the device.
    """
    mesh = trainer.mesh
    counts = trainer.compile_statistics.local_counts()
    # `pack` divides by the tensor degree, because most numbers are equal on all tensor ranks; this one is not.
    rank_seconds = torch.zeros(mesh.size)
    rank_seconds[mesh.rank] = seconds * mesh.tensor.size
    on_host = torch.cat((torch.tensor([float(stop), float(writing)]), counts.float(), rank_seconds))
    numbers = upload(on_host, loss.device), take_expert_load(trainer), trainer.module_losses, differing
    return all_reduce(trainer.functions.pack(loss, mesh.tensor.size, *numbers), mesh.world)


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
def take_logit_clip(trainer: Trainer) -> LogitClip | None:
    """The largest logits of all ranks since the last call; None without `train.qk_clip`. Collective.

    One all-reduce over all ranks, of L·n float32 numbers of L layers and n query heads, covers the microbatches of data ranks,
    tokens of context ranks, heads of tensor ranks and layers of pipeline stages. Nothing is read on the host.
    """
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


@dataclass
class Marks:
    """Points in time of a step: begin, batch read, backward done, statistics reduced, end."""

    begin: Mark
    ready: Mark | None = None
    backward: Mark | None = None
    reduced: Mark | None = None
    end: Mark | None = None


@dataclass(frozen=True)
class StepTimings:
    """Seconds of a step and its parts on this rank, by the host's clock or an asynchronous device's."""

    total: float
    data_wait: float
    forward_backward: float
    optimizer: float
    communication: float  # during which the host waited in collectives
    compute: float  # forward and backward without those waits


class QueuedStep:
    """A step whose work is queued on the device, and whose results are being copied to the host.

    Args:
        results: the result of `reduce_statistics`, those of QK-clip if it is used, the gradient and parameter norms, and whether
            the update was skipped.
        waits: seconds that the host waited in collectives during forward and backward, and during the step.
    """

    def __init__(
        self,
        step: int,
        learning_rate: float,
        results: Tensor,
        marks: Marks,
        waits: tuple[float, float],
    ) -> None:
        self.step, self.learning_rate = step, learning_rate
        self._numbers = Download(results)
        self._marks, self._waits = marks, waits

    def read(self, trainer: Trainer) -> tuple[StepStatistics, StepTimings]:
        """Wait for the step and return its statistics and timings."""
        device, ranks = trainer.device, trainer.mesh.size
        loss, stops, writers, *rest, gradient_norm, parameter_norm, skipped = self._numbers.wait().tolist()
        max_logit, clipped = None, None
        if trainer.profile.train.qk_clip is not None:
            *rest, max_logit, clipped = rest
        *rest, differing = rest
        rest, modules = rest[: len(rest) - trainer.depth], rest[len(rest) - trainer.depth :]
        end = len(rest) - load_size(trainer.profile.model)
        experts = read_expert_load(rest[end:], trainer.profile.model.num_layers)
        rest, results = rest[:end], (differing, gradient_norm, parameter_norm, bool(skipped))
        counts = rest[:-ranks], rest[-ranks:]
        of_clip = max_logit, None if clipped is None else int(clipped) * (not skipped)
        statistics = StepStatistics(loss, stops, writers, *counts, *results, experts, modules, *of_clip)
        marks, (forward_waits, waits) = self._marks, self._waits
        forward_backward = device.seconds(marks.ready, marks.backward)
        timings = StepTimings(
            total=device.seconds(marks.begin, marks.end),
            data_wait=device.seconds(marks.begin, marks.ready),
            forward_backward=forward_backward,
            optimizer=device.seconds(marks.reduced, marks.end),
            communication=waits,
            compute=forward_backward - (forward_waits if device.synchronous else 0.0),
        )
        return statistics, timings


@dataclass(frozen=True)
class StepRecord:
    """A finished step; `skip_reason` is empty if the weights were updated."""

    step: int
    learning_rate: float
    statistics: StepStatistics
    skip_reason: str
    timings: StepTimings
