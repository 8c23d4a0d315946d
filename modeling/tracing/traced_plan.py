"""A plan with the costs of traced graphs (trace.py) instead of the planner's eager estimates.

activations    saved by autograd per microbatch, times the microbatches in flight, plus the maximum that one graph needs in
               addition; messages, gradient exchange and token ids as in the plan
flops          of a step, in matrix products and attention, including recomputation and passes without gradients; the planner's
               if a program's graphs differ in FLOPs, as those of dense layers and experts do: a trace does not count their calls

The loss's FLOPs are the planner's, and its memory is where graphs do not show it: gradients of logits that GPUs keep are inputs
of graphs, and a user-defined loss is in none.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from modeling.compilation.graph_cache import BLOCKS
from modeling.models.build import (
    defers_weight_gradients,
    gathers_in_graph,
    layer_modes,
    partition_layers,
)
from modeling.planning.memory import activation_bytes, choice_bytes, microbatches_in_flight, plan_buckets
from modeling.planning.planner import Plan, fits
from modeling.planning.stage_costs import StageCosts, counts_choices
from modeling.planning.step_time import estimate
from profiles.schema import Profile


@dataclass(frozen=True)
class TracedRank:
    """Traced costs of the ranks at one position in the pipeline."""

    activations: int
    flops: float


def traced_ranks(profile: Profile, traced: Mapping[str, Any]) -> list[TracedRank]:
    """Traced costs by pipeline rank; `traced`: a `Trace` as JSON."""
    ranks, partition, costs = profile.parallel.pipeline, partition_layers(profile), StageCosts(profile)
    (flops, ambiguous), modes = _region_flops(profile, traced), layer_modes(profile)
    tokens = profile.micro_batch_rows * profile.train.sequence_length // profile.parallel.context
    result = []
    for rank, microbatches in enumerate(microbatches_in_flight(profile)):
        stages, layers = traced["stages"][rank::ranks], partition[rank::ranks]
        working = math.ceil(microbatches * sum(stage["saved"] for stage in stages))
        modules = [costs.module(held) for held in layers]
        peak, loss = costs.loss(modules[-1]) if modules[-1].last else (0, 0)
        if not (profile.train.loss or (modules[-1].last and modules[-1].loss_chunks(tokens).keep)):
            peak = 0
        working += max(peak, *(stage["peak"] for stage in stages)) + choice_bytes(profile, layers)
        buckets = plan_buckets(profile, modules)
        if gathers_in_graph(profile):  # the blocks' weights and gradients are results of the graphs
            buckets = [bucket for bucket in buckets if bucket.resident or not bucket.block]
        activations = activation_bytes(profile, working, microbatches, costs.hidden_bytes, buckets)
        calls = [
            Counter(BLOCKS[modes[layer]] for layer in (*held, *module.ahead))
            for module, held in zip(modules, layers, strict=True)
        ]
        if ambiguous.isdisjoint(region for stage in calls for region in stage):
            work = loss + sum(times * flops[region] for stage in calls for region, times in stage.items())
        else:
            work = sum(layer.flops for held in layers for layer in costs.layers(held))
        result.append(TracedRank(activations, profile.accumulation_steps * work))
    return result


def _region_flops(profile: Profile, traced: Mapping[str, Any]) -> tuple[Counter[str], set[str]]:
    """FLOPs of one call of each region in a step, and the regions whose calls have different FLOPs."""
    flops: Counter[str] = Counter()
    ambiguous: set[str] = set()
    found: dict[str, set[int]] = {}
    # times that a step calls a program for each of the region's calls in training
    passes = {"training": 1, "evaluation": profile.scores_pairs_in_step + counts_choices(profile)}
    for program in traced["programs"]:
        found.setdefault(program["name"], set()).add(sum(graph["flops"] for graph in program["graphs"]))
    for name, values in found.items():
        region, _, mode = name.partition(", ")
        if times := passes.get(mode):
            flops[region] += times * max(values)
            if len(values) > 1:
                ambiguous.add(region)
    return flops, ambiguous


def apply_trace(profile: Profile, planned: Plan, traced: Mapping[str, Any]) -> Plan:
    """The plan with traced activations and FLOPs, and with the resulting fit, times and price."""
    deferred = defers_weight_gradients(profile)  # a third of the products is in no graph then
    stages = tuple(
        replace(
            stage,
            bytes={**stage.bytes, "activations": rank.activations},
            flops=stage.flops if deferred else rank.flops,
        )
        for stage, rank in zip(planned.stages, traced_ranks(profile, traced), strict=True)
    )
    return replace(
        planned,
        stages=stages,
        fits=fits(stages, planned.host_bytes, planned.device_bytes, planned.reserve),
        **asdict(estimate(profile, stages, len(stages[0].layers))),
    )
