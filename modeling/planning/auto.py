"""Resolve settings that depend on memory: `train.recompute: auto`, `parallel.keep_gathered: auto`.

Gathered weights are kept if that plan fits and its step is shorter or, where times are unknown, if it computes and sends less.
Activation checkpointing is chosen for each layer of a pipeline rank: the cheapest that fits memory.

Layers with equal costs form a group, for which only the numbers of `full` and `selective` layers are chosen. The first layers of
a group are `full`, followed by the `selective` ones: so the backward passes that need the most memory besides what is saved run
last, when the least is saved. A stage of n equal layers thus has (n + 1)(n + 2) / 2 mixes, all of which are evaluated as arrays.
For several stages on a rank, the mixes that are not dominated in cost and memory are combined.

The cost is time, and the bytes moved by operators other than products, which time does not include but which are most of the
cost of `selective`. Each change of mode from one layer to the next makes a plan harder to read, and each mode has its own graphs
to compile. So among the mixes within TOLERANCE of the least time, and among those within TOLERANCE of the least bytes, the one
with the fewest changes is chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from modeling.models.build import device_of, partition_layers
from modeling.planning import memory
from modeling.planning.planner import Plan, device_bytes, host_bytes, plan
from modeling.planning.stage_costs import CostCache, LayerCosts, StageCosts
from modeling.planning.step_time import layer_seconds
from profiles.check import passes, with_value
from profiles.recompute import AUTO, MODES, from_layer_modes
from profiles.schema import Profile

HUGE = 2**60  # bytes, more than any device has
TOLERANCE = (0.002, 0.02)  # of the time and of the bytes without checkpointing
EXACT, LEVELS = 2000, 256  # more mixes of a stage are compared by this many levels of cost and memory
NONE, SELECTIVE, FULL = MODES
Layer = Mapping[str, LayerCosts]  # costs by mode
Cost = tuple[float, float]  # seconds, and bytes moved


def resolve_auto(profile: Profile, cache: CostCache | None = None) -> Profile:
    """Replace each `auto` by a value that fits the device; profiles without one are returned unchanged.

    If nothing fits, chooses what needs the least memory, which `planner.require_fit` then rejects.

    Args:
        cache: measurements of layers in other plans, to reuse and extend.
    """
    cache = {} if cache is None else cache
    if profile.parallel.keep_gathered != AUTO:
        return _choose_recompute(profile, cache)
    released, kept = (with_value(profile, "parallel.keep_gathered", keep) for keep in (False, True))
    released = _choose_recompute(released, cache)
    if not passes(kept):
        return released
    kept = _choose_recompute(kept, cache)
    without, plan_kept = plan(released, cache), plan(kept, cache)
    if not plan_kept.fits:
        return released
    return kept if _cost(plan_kept) < _cost(without) else released


def _cost(planned: Plan) -> tuple[float, ...]:
    if planned.step_seconds is not None:
        return (planned.step_seconds,)
    return max(stage.flops for stage in planned.stages), sum(planned.communication.values())


def _choose_recompute(profile: Profile, cache: CostCache) -> Profile:
    if profile.train.recompute != AUTO:
        return profile
    without = with_value(profile, "train.recompute", MODES[0])
    if plan(without, cache).fits:
        return without
    costs, partition, ranks = StageCosts(profile, cache), partition_layers(profile), profile.parallel.pipeline
    chosen: list[list[str]] = [[]] * len(partition)
    plan_buckets = memory.bucket_planner(profile, cache)
    for rank, microbatches in enumerate(memory.microbatches_in_flight(profile)):
        layers = partition[rank::ranks]
        buckets = plan_buckets(*map(costs.module, layers))
        chosen[rank::ranks] = _choose_on_rank(profile, costs, layers, microbatches, buckets)
    return with_value(profile, "train.recompute", from_layer_modes(chosen))


def _choose_on_rank(
    profile: Profile,
    costs: StageCosts,
    partition: Sequence[range],
    microbatches: float,
    buckets: Sequence[memory.PlannedBucket],
) -> list[list[str]]:
    """The modes of the layers of a pipeline rank's stages."""
    room = (1 - device_of(profile).reserve) * device_bytes(profile) - host_bytes(profile)
    # With working memory this large, the peak is never at another time, so everything else simply adds to it.
    held = memory.rank_bytes(profile, HUGE, microbatches, costs.hidden_bytes, buckets)
    rest = sum(held.values()) - HUGE + memory.choice_bytes(profile, partition)

    def cost(layer: LayerCosts) -> tuple[float, float]:
        return layer_seconds(profile, layer), layer.moved

    stages = [[{mode: costs.layer(i, mode) for mode in MODES} for i in layers] for layers in partition]
    return choose_modes(stages, microbatches, room - rest, cost)


@dataclass(frozen=True)
class _Mixes:
    """Ways to checkpoint the stages of a rank, one array entry each."""

    cost: np.ndarray  # (2, mixes), in addition to that without checkpointing
    saved: np.ndarray  # bytes that a microbatch saves in all stages
    largest: np.ndarray  # bytes that a microbatch saves in the largest stage
    peak: np.ndarray  # peak bytes of a microbatch's forward and backward through one stage
    changes: np.ndarray  # number of changes of the mode from one layer to the next
    counts: np.ndarray  # (groups, 2, mixes): number of full and of selective layers of each group

    def take(self, chosen: np.ndarray) -> _Mixes:
        return _Mixes(*(array[..., chosen] for array in vars(self).values()))


def choose_modes(
    stages: Sequence[Sequence[Layer]],
    microbatches: float,
    limit: float,
    cost: Callable[[LayerCosts], Cost],
    tolerance: Cost = TOLERANCE,
) -> list[list[str]]:
    """The modes of a rank's layers, by stage: the cheapest within the limit, else the smallest.

    Optimal if, of two modes, the one that saves fewer bytes needs at least as much temporary memory.

    Args:
        stages: the layers of each stage.
        microbatches: number of microbatches in flight, at least 1.
        limit: limit of `memory.eager_working_bytes`.
        cost: returns the cost of a microbatch in a layer.
    """
    costs = {
        id(layer[mode]): np.array(cost(layer[mode]))
        for layers in stages
        for layer in layers
        for mode in MODES
    }
    grouped = [_groups(layers) for layers in stages]
    mixes = _of_stage(stages[0], grouped[0], costs)
    for layers, groups in zip(stages[1:], grouped[1:], strict=True):
        mixes = _combine(_undominated(mixes), _undominated(_of_stage(layers, groups, costs)))
    working = np.ceil(microbatches * mixes.saved) - mixes.largest + mixes.peak
    if (candidates := np.flatnonzero(working <= limit)).size:
        room = np.array(tolerance) * sum(costs[id(layer[NONE])] for layers in stages for layer in layers)
        for each, slack in zip(mixes.cost, room, strict=True):
            candidates = candidates[each[candidates] <= each[candidates].min() + slack]
        order = mixes.changes, *mixes.cost, working
    else:
        candidates, order = np.arange(len(working)), (working, *mixes.cost)
    best = candidates[np.lexsort([key[candidates] for key in reversed(order)])[0]]
    counts = iter(mixes.counts[..., best].tolist())
    return [_modes(len(layers), groups, counts) for layers, groups in zip(stages, grouped, strict=True)]


def _groups(layers: Sequence[Layer]) -> list[list[int]]:
    """Numbers of the layers in each group of equal costs."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, layer in enumerate(layers):
        groups.setdefault(tuple(id(layer[mode]) for mode in MODES), []).append(number)
    return [*groups.values()]


def _of_stage(
    layers: Sequence[Layer], groups: Sequence[Sequence[int]], costs: Mapping[int, np.ndarray]
) -> _Mixes:
    """All mixes of a stage; `costs`: by identity of a layer's costs."""
    options = [
        np.array([(full, other) for full in range(n + 1) for other in range(n + 1 - full)])
        for n in map(len, groups)
    ]
    picked = np.meshgrid(*(np.arange(len(option)) for option in options), indexing="ij")
    counts = np.stack([option[pick.ravel()].T for option, pick in zip(options, picked, strict=True)])
    extra = np.zeros((2, counts.shape[-1]))
    for group, chosen in zip(groups, counts, strict=True):
        layer = layers[group[0]]
        for mode, count in zip((FULL, SELECTIVE), chosen, strict=True):
            extra += np.outer(costs[id(layer[mode])] - costs[id(layer[NONE])], count)
    position = {number: (g, i) for g, group in enumerate(groups) for i, number in enumerate(group)}
    saved, peak, changes = (np.zeros(counts.shape[-1], dtype=np.int64) for _ in range(3))
    before = None
    for number, layer in enumerate(layers):
        g, index = position[number]
        full, selective = counts[g]
        modes = np.where(index < full, 2, np.where(index < full + selective, 1, 0))  # indices in MODES
        tops = np.array([max(layer[name].forward_peak, layer[name].backward_peak) for name in MODES])
        peak = np.maximum(peak, saved + tops[modes])
        saved = saved + np.array([layer[name].saved for name in MODES])[modes]
        changes += 0 if before is None else modes != before
        before = modes
    return _Mixes(extra, saved, saved, peak, changes, counts)


def _combine(left: _Mixes, right: _Mixes) -> _Mixes:
    """Every mix of some stages with every mix of another."""
    i, j = (index.ravel() for index in np.indices((len(left.saved), len(right.saved))))
    left, right = left.take(i), right.take(j)
    return _Mixes(
        left.cost + right.cost,
        left.saved + right.saved,
        np.maximum(left.largest, right.largest),
        np.maximum(left.peak, right.peak),
        left.changes + right.changes,
        np.concatenate((left.counts, right.counts)),
    )


def _undominated(mixes: _Mixes) -> _Mixes:
    """Undominated mixes; a larger largest stage is better, because its saved bytes count once less."""
    rows = np.stack((*mixes.cost, mixes.saved, mixes.peak, mixes.changes, -mixes.largest), 1)
    order = np.lexsort(rows.T[::-1])
    if len(rows) > EXACT:
        span = np.ptp(rows, 0)
        rows = np.rint((rows - rows.min(0)) / np.where(span, span, 1) * LEVELS)
        order = order[np.unique(rows[order], axis=0, return_index=True)[1]]
    kept: list[int] = []
    front = np.empty((0, rows.shape[1]))
    for index in order:
        if not (front <= rows[index]).all(1).any():
            kept.append(index)
            front = np.concatenate((front, rows[index : index + 1]))
    return mixes.take(np.array(kept))


def _modes(layers: int, groups: Sequence[Sequence[int]], counts: Iterator[Sequence[int]]) -> list[str]:
    """The modes of a stage's layers, given each group's numbers of full and of selective layers."""
    modes = [NONE] * layers
    for group in groups:
        full, selective = next(counts)
        for mode, numbers in ((FULL, group[:full]), (SELECTIVE, group[full : full + selective])):
            for number in numbers:
                modes[number] = mode
    return modes
