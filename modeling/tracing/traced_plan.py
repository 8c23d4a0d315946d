"""What the traced graphs (trace.py) come to on each rank of the pipeline, and a plan with these figures in the place of its own.

activations    what autograd keeps of a microbatch, times the microbatches in flight, and the most that one graph needs besides;
               messages between stages and exchanges of gradients come on top
flops          of a step, in matrix products and attention, recomputation included
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from modeling.models.build import extra_warmup_forwards, partition_layers
from modeling.planning.planner import MARGIN, Plan
from modeling.planning.step_time import estimate
from parallel.pipeline.schedules import in_flight
from profiles.schema import Profile


@dataclass(frozen=True)
class Rank:
    """The figures of the ranks at one place of the pipeline."""

    activations: int
    flops: float


def ranks(profile: Profile, traced: Mapping[str, Any]) -> list[Rank]:
    """Of every place of the pipeline, in order.

    Args:
        traced: a `Trace` as JSON.
    """
    flops = {
        program["name"].partition(",")[0]: sum(graph["flops"] for graph in program["graphs"])
        for program in traced["programs"]
        if program["name"].endswith("training")
    }
    degree, count, layers = profile.parallel.pipeline, profile.accumulation_steps, partition_layers(profile)
    found = []
    for place in range(degree):
        own = traced["stages"][place::degree]
        alive = in_flight(
            profile.parallel.schedule,
            degree,
            place,
            count,
            stages_per_rank=len(own),
            extra_forwards=extra_warmup_forwards(profile),
        )
        kept = math.ceil(alive * sum(stage["kept"] for stage in own))
        calls = [_calls(profile, held, last=held is layers[-1]) for held in layers[place::degree]]
        work = sum(times * flops.get(region, 0) for each in calls for region, times in each.items() if times)
        found.append(Rank(kept + max(stage["peak"] for stage in own), count * work))
    return found


def replaced(profile: Profile, planned: Plan, traced: Mapping[str, Any]) -> Plan:
    """The plan with the traced figures, and with what follows from them: whether it fits, times and price."""
    stages = tuple(
        replace(stage, bytes={**stage.bytes, "activations": rank.activations}, flops=rank.flops)
        for stage, rank in zip(planned.stages, ranks(profile, traced), strict=True)
    )
    fits = max(stage.total for stage in stages) + planned.host_bytes <= MARGIN * planned.device_bytes
    return replace(
        planned, stages=stages, fits=fits, **asdict(estimate(profile, stages, len(stages[0].layers)))
    )


def _calls(profile: Profile, layers: range, *, last: bool) -> dict[str, int]:
    """How often a microbatch runs each region on a stage."""
    again = profile.train.recompute_layers
    some = 0 if again is None else min(again, len(layers))
    return {"block": len(layers) - some, "recomputed block": some, "loss": int(last)}
