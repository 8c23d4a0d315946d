"""Resolve settings that depend on memory: `train.recompute: auto`, `parallel.keep_gathered: auto`.

Activation checkpointing is chosen for each layer (recomputation.py): the fastest that fits each pipeline rank. Gathered weights
are kept if that plan fits and its step is shorter or, where times are unknown, if it computes and sends less.
"""

from __future__ import annotations

from collections.abc import Sequence

from modeling.models.build import partition_layers
from modeling.planning import memory
from modeling.planning.planner import Plan, device_bytes, host_bytes, plan, reserved_share
from modeling.planning.recomputation import choose_modes
from modeling.planning.stage_costs import CostCache, LayerCosts, StageCosts
from modeling.planning.step_time import layer_seconds
from profiles.check import passes, with_value
from profiles.recompute import AUTO, MODES, from_layer_modes
from profiles.schema import Profile

HUGE = 2**60  # bytes, more than any device has


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
    for rank in range(ranks):
        layers, microbatches = partition[rank::ranks], memory.microbatches_in_flight(profile, rank)
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
    room = (1 - reserved_share(profile)) * device_bytes(profile) - host_bytes(profile)
    # With working memory this large, the peak is never at another time, so everything else simply adds to it.
    held = memory.rank_bytes(profile, HUGE, microbatches, costs.hidden_bytes, buckets)
    rest = sum(held.values()) - HUGE + memory.choice_bytes(profile, partition)

    def cost(layer: LayerCosts) -> tuple[float, float]:
        return layer_seconds(profile, layer), layer.moved

    stages = [[{mode: costs.layer(i, mode) for mode in MODES} for i in layers] for layers in partition]
    return choose_modes(stages, microbatches, room - rest, cost)
