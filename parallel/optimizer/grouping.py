"""Which parameters share a bucket, and which are sharded with their unit (FSDP)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from parallel.layout import layout_of
from parallel.optimizer.fsdp import Unit

Named = tuple[str, nn.Parameter]


@dataclass(frozen=True)
class WeightDecay:
    """The weight decay of matrices, and with `norms` of biases and norms, too; else 0."""

    value: float
    norms: bool = False

    def __call__(self, parameter: nn.Parameter) -> float:
        return self.value * (self.norms or parameter.dim() > 1)


MATRICES = WeightDecay(0.1)


class Group(NamedTuple):
    """The parameters of one bucket."""

    weight_decay: float  # divided by the learning-rate multiplier, so that equal decays shrink weights equally in a step
    partial_axes: tuple[str, ...]  # over which their gradients are partial sums
    members: list[Named]


@dataclass(frozen=True)
class Groups:
    """The parameters of a rank."""

    sharded: list[tuple[Unit, list[Group]]]  # matrices of units, of which a rank holds its shard between uses
    shards_frozen: bool  # whether these are frozen: then no others are sharded
    resident: list[Group]  # trained, held by every rank
    frozen: list[Named]  # held by every rank


def group_parameters(
    named: Iterable[Named], units: Sequence[Unit], weight_decay: Callable[[nn.Parameter], float], size: int
) -> Groups:
    """Group a rank's parameters.

    Args:
        units: units whose matrices are sharded: the frozen ones, or if no parameter is frozen, all.
        size: minimum number of elements in a resident bucket before the next one starts.
    """
    named = list(named)
    trained = [item for item in named if item[1].requires_grad]
    frozen = [item for item in named if not item[1].requires_grad]
    remaining, sharded = frozen or trained, []
    for unit in units:
        held: list[Named] = []
        others: list[Named] = []
        for item in remaining:
            (held if unit.holds(*item) else others).append(item)
        remaining = others
        sharded.append((unit, _fill_buckets(held, weight_decay, sys.maxsize)))
    resident = _fill_buckets(trained if frozen else remaining, weight_decay, size)
    return Groups(sharded, bool(frozen), resident, remaining if frozen else [])


def _fill_buckets(
    named: Iterable[Named], weight_decay: Callable[[nn.Parameter], float], size: int
) -> list[Group]:
    """Group parameters by dtype, weight decay, learning rate, partial axes, update rule, matrix or vector.

    Experts' parameters have separate buckets.
    """
    kinds: dict[tuple[Any, ...], list[list[Named]]] = {}
    # Backward computes the last parameters' gradients first, so buckets are filled from the end.
    for name, parameter in reversed(list(named)):
        layout = layout_of(parameter)
        rule = layout.expert_ranks, layout.sign_step, parameter.dim() > 1, layout.rate
        kind = (parameter.dtype, weight_decay(parameter) / layout.rate, layout.partial_axes, rule)
        buckets = kinds.setdefault(kind, [[]])
        if sum(p.numel() for _, p in buckets[-1]) >= size:
            buckets.append([])
        buckets[-1].append((name, parameter))
    return [
        Group(decay, partial, bucket)
        for (_, decay, partial, _), buckets in kinds.items()
        for bucket in buckets
    ]
