"""`train.recompute: auto`: the least activation checkpointing whose plan fits the device.

Modes cost more compute from one to the next (activation_checkpointing.py), so the first mode that fits for all layers is taken,
and of it the fewest layers that fit: `train.recompute_layers`, found by bisection.
"""

from __future__ import annotations

from bisect import bisect_left

from modeling.models.build import partition_layers
from modeling.planning.planner import plan
from modeling.planning.stage_costs import CostCache
from parallel.activation_checkpointing import MODES
from profiles.check import with_value
from profiles.schema import Profile


def choose_recompute(profile: Profile, cache: CostCache | None = None) -> Profile:
    """Replace `train.recompute: auto` by a mode and a number of layers; other profiles are returned as they are.

    If nothing fits, it is `full` for all layers, which `planner.require_fit` rejects.

    Args:
        cache: measurements of other plans of the same model, to reuse and extend.
    """
    if profile.train.recompute != "auto":
        return profile
    cache = {} if cache is None else cache

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
