"""Which parameters share a bucket, and which are sharded with their unit (FSDP)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from parallel.layout import layout_of
from parallel.optimizer.adamw import AdamW
from parallel.optimizer.buckets import Group, Named
from parallel.optimizer.fsdp import Unit
from parallel.optimizer.rules import Rule, SignStep

ChooseRule = Callable[[str, nn.Parameter], Rule]
"""The rule of a parameter that its layout gives none."""


@dataclass(frozen=True)
class WeightDecay:
    """The weight decay of matrices, and with `norms` of biases and norms, too; else 0."""

    value: float
    norms: bool = False

    def __call__(self, parameter: nn.Parameter) -> float:
        return self.value * (self.norms or parameter.dim() > 1)


MATRICES = WeightDecay(0.1)


@dataclass(frozen=True)
class EverywhereRule:
    """The same rule for all parameters."""

    rule: Rule

    def __call__(self, name: str, parameter: nn.Parameter) -> Rule:
        return self.rule


ADAMW = EverywhereRule(AdamW())


@dataclass(frozen=True)
class Groups:
    """The parameters of a rank."""

    sharded: list[tuple[Unit, list[Group]]]  # matrices of units, of which a rank holds its shard between uses
    shards_frozen: bool  # whether these are frozen: then no others are sharded
    resident: list[Group]  # trained, held by every rank
    frozen: list[Named]  # held by every rank


def group_parameters(
    named: Iterable[Named],
    units: Sequence[Unit],
    weight_decay: Callable[[nn.Parameter], float],
    size: int,
    rule: ChooseRule = ADAMW,
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
        sharded.append((unit, _fill_buckets(held, weight_decay, sys.maxsize, rule)))
    resident = _fill_buckets(trained if frozen else remaining, weight_decay, size, rule)
    return Groups(sharded, bool(frozen), resident, remaining if frozen else [])


def _fill_buckets(
    named: Iterable[Named], weight_decay: Callable[[nn.Parameter], float], size: int, choose: ChooseRule
) -> list[Group]:
    """Group parameters by dtype, weight decay, learning rate, partial axes, update rule, matrix or vector.

    Experts' parameters have separate buckets.
    """
    kinds: dict[tuple[Any, ...], list[Group]] = {}
    # Backward computes the last parameters' gradients first, so buckets are filled from the end.
    for name, parameter in reversed(list(named)):
        layout = layout_of(parameter)
        rule = choose(name, parameter) if layout.sign_step is None else SignStep(layout.sign_step)
        rate = rule.rate(layout)
        decay, partial = weight_decay(parameter) / rate, layout.partial_axes
        kind = (rule, rate, decay, partial, parameter.dtype, layout.expert_ranks, parameter.dim() > 1)
        groups = kinds.setdefault(kind, [])
        if not groups or sum(p.numel() for _, p in groups[-1].members) >= size:
            groups.append(Group(rule, rate, decay, partial, []))
        groups[-1].members.append((name, parameter))
    return [group for groups in kinds.values() for group in groups]
