"""Cost of `train.deterministic` on GPUs: measured if both tables exist, else estimated.

torch's deterministic mode excludes cuDNN's attention, so that runs use FlashAttention-2, whose deterministic backward adds in a
fixed order. The estimate exchanges one kernel's speed for the other's in causal attention and nothing else.
"""

from __future__ import annotations

from modeling.models.build import device_of, partition_layers
from modeling.planning import calibration
from modeling.planning.planner import Plan, plan
from modeling.planning.stage_costs import StageCosts
from profiles.check import with_value
from profiles.schema import Profile

# FLOP/s on a Hopper GPU, forward and backward: causal, 8,192 tokens, heads of 128 (flash-attention, pull request 1893).
DETERMINISTIC, FASTEST = (306.2e12, 166.0e12), (565.7e12, 469.8e12)  # FlashAttention-2; cuDNN
SOURCE = "published speeds of FlashAttention-2 and cuDNN on a Hopper GPU, flash-attention pull request 1893"
PUBLISHED_FOR = ("h100", "h200")  # which compute equally fast


def describe_cost(profile: Profile, planned: Plan) -> str | None:
    """Cost of deterministic kernels as text; None if the setting has no effect or times are unknown."""
    device = device_of(profile)
    if not device.nondeterministic or planned.step_seconds is None:
        return None
    if not profile.train.deterministic:
        return "off: the fastest kernels; a resumed run is not bit-identical"
    other = with_value(profile, "train.deterministic", False)
    if calibration.find(profile) and calibration.find(other):
        fastest = plan(other).step_seconds
        slower = planned.step_seconds / fastest - 1 if fastest else 0.0
        return f"on, the default: a step is {slower:.0%} longer than with the fastest kernels, by both measured tables"
    if profile.cluster.accelerator not in PUBLISHED_FOR or profile.document_masks:
        return "on, the default: its cost is neither measured nor estimated for this run"
    share = _attention_seconds(profile) / planned.step_seconds
    return f"on, the default: not measured; attention's kernels make a step about {share:.0%} longer (estimate: {SOURCE})"


def seconds_per_flop(speeds: tuple[float, float]) -> float:
    """Average seconds of a FLOP of attention, which has two products in forward and five in backward."""
    forward, backward = speeds
    return (2 / forward + 5 / backward) / 7


def _attention_seconds(profile: Profile) -> float:
    """Additional seconds of a step in attention, on the pipeline rank that computes most of it."""
    costs, partition, ranks = StageCosts(profile), partition_layers(profile), profile.parallel.pipeline
    flops = max(
        sum(
            size
            for stage in partition[rank::ranks]
            for layer in costs.layers(stage)
            for (operation, *_), size in layer.products.items()
            if operation == "attention"
        )
        for rank in range(ranks)
    )
    return profile.accumulation_steps * flops * (seconds_per_flop(DETERMINISTIC) - seconds_per_flop(FASTEST))
