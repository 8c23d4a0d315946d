"""Resolve the settings that depend on memory: `train.recompute: auto` and `parallel.keep_gathered: auto`.

Modes of activation checkpointing cost more compute from one to the next (activation_checkpointing.py), so the first mode that
fits the device for all layers is taken, and of it the fewest layers that fit: `train.recompute_layers`, found by bisection.
Gathered weights are kept if that plan fits and its step is shorter; where times are unknown, if it sends less and recomputes no
more.
"""

from __future__ import annotations

from bisect import bisect_left

from modeling.models.build import partition_layers
from modeling.planning.planner import Plan, plan
from modeling.planning.stage_costs import CostCache
from parallel.activation_checkpointing import MODES
from profiles.check import passes, with_value
from profiles.schema import Profile

AUTO = "auto"


def resolve_auto(profile: Profile, cache: CostCache | None = None) -> Profile:
    """Replace each `auto` of a profile by what fits the device; other profiles are returned as they are.

    If nothing fits, chooses what needs the least memory, which `planner.require_fit` then rejects.

    Args:
        cache: measurements of other plans of the same model, to reuse and extend.
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
    return kept if _cost(kept, plan_kept) < _cost(released, without) else released


def _cost(profile: Profile, planned: Plan) -> tuple[float, ...]:
    if planned.step_seconds is not None:
        return (planned.step_seconds,)
    return MODES.index(profile.train.recompute), sum(planned.sent.values())


def _choose_recompute(profile: Profile, cache: CostCache) -> Profile:
    if profile.train.recompute != AUTO:
        return profile

    def with_layers(mode: str, layers: int | None) -> Profile:
        return with_value(with_value(profile, "train.recompute", mode), "train.recompute_layers", layers)

    def fits(candidate: Profile) -> bool:
        return plan(candidate, cache).fits

    mode = next((mode for mode in MODES if fits(with_layers(mode, None))), MODES[-1])
    if mode == MODES[0]:
        return with_layers(mode, None)
    most = max(map(len, partition_layers(profile)))
    layers = 1 + bisect_left(range(1, most), True, key=lambda count: fits(with_layers(mode, count)))
    return with_layers(mode, layers if layers < most else None)
