"""Topology search: feasible topologies of a cluster, fastest first, and why others are rejected.

Combinations of degrees: a tensor degree (the valid ones within a node, and powers of two to explain why they are invalid), a
pipeline degree that divides the remaining ranks, a context degree for long sequences, an expert degree for models with experts,
and a sharding over the data and context ranks: ZeRO-1, FSDP over all of them, or HSDP, which shards over the ranks of a node and
replicates across nodes. Each uses the least recomputation that fits, and keeps gathered weights where that is faster. The fastest
of them are then changed step by step, also in what the combinations leave as in the profile: microbatches, stages per rank, HSDP
degrees and context degrees of short sequences (`Variation`). Nodes, devices, batch and sequence length are the profile's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from modeling.models.build import device_of, partition_layers
from modeling.models.flops import layer_multiply_adds
from modeling.planning import memory
from modeling.planning.auto import resolve_auto
from modeling.planning.planner import CONTEXT_TOKENS, Plan, device_bytes, plan
from modeling.planning.stage_costs import CostCache, StageCosts
from modeling.planning.step_time import layer_seconds
from parallel.constraints import valid_expert_degrees
from parallel.pipeline.schedules import bubble, cut_layers
from profiles.check import broken_rule, get_value, passes, with_value
from profiles.errors import ProfileError
from profiles.recompute import AUTO, MODES, Recompute, modes_of
from profiles.schema import Profile

DERIVED = ("parallel.pipeline_cuts",)
STARTS = 3  # topologies that the search changes step by step
VARIATIONS = 100  # plans after which it stops
GAIN = 0.01  # share of a step that a change must save; plans are not more exact
MANY = 64  # combinations above which those that are slow for certain are left out
SLOW = 1.1  # of the fastest step
SLOWER = f"is more than {SLOW} times as slow as the first, with other degrees"


# Minimum tokens of a sequence per context rank, fewer than the planner proposes (planner.py): each rank has two parts of it,
# whose products must keep a device busy.
LEAST_CONTEXT_TOKENS = 1024


@dataclass(frozen=True)
class Variation:
    """The keys of a topology that the search changes."""

    tensor: int
    pipeline: int
    context: int
    expert: int
    sharding: str
    shard_degree: int | None
    stages: int  # per pipeline rank
    microbatch: int  # samples

    @classmethod
    def of(cls, profile: Profile, overrides: Mapping[str, Any]) -> Variation:
        """The variation that a topology's overrides describe."""
        parallel = profile.parallel

        def chosen(name: str) -> Any:
            return overrides.get(f"parallel.{name}", getattr(parallel, name))

        pipeline, cuts = chosen("pipeline"), overrides.get("parallel.pipeline_cuts")
        stages = 2 if chosen("schedule") == "interleaved" and pipeline > 1 else 1
        return cls(
            chosen("tensor"),
            pipeline,
            chosen("context"),
            chosen("expert"),
            chosen("data_sharding"),
            chosen("shard_degree"),
            (len(cuts) + 1) // pipeline if cuts else stages,
            overrides.get("train.micro_batch_size", profile.train.micro_batch_size),
        )

    def keys(self, profile: Profile) -> dict[str, Any]:
        """The profile keys to set; schedule, cuts and microbatch only if they differ from the profile's."""
        parallel, train = profile.parallel, profile.train
        overrides: dict[str, Any] = {
            f"parallel.{name}": getattr(self, name) for name in ("tensor", "pipeline", "context")
        }
        if profile.model.num_experts is not None:
            overrides["parallel.expert"] = self.expert
        overrides |= {"parallel.data_sharding": self.sharding, "parallel.shard_degree": self.shard_degree}
        overrides["parallel.keep_gathered"] = AUTO if self.sharding == "fsdp" else False
        default = 2 if parallel.schedule == "interleaved" and self.pipeline > 1 else 1
        if self.stages != default:
            overrides["parallel.schedule"] = "interleaved" if self.stages > 1 else "1f1b"
        if self.stages > 2:
            ranges = cut_layers(layer_multiply_adds(profile), self.stages * self.pipeline)
            overrides["parallel.pipeline_cuts"] = [stage.start for stage in ranges[1:]]
        if self.microbatch != train.micro_batch_size:
            overrides["train.micro_batch_size"] = self.microbatch
        return overrides

    def neighbours(self, profile: Profile) -> Iterator[Variation]:
        """Variations with one change, and some with two that belong together."""
        nearby, own = self._nearby(profile).items(), self.shard_degree
        changes: list[dict[str, Any]] = [{name: value} for name, values in nearby for value in values]
        degrees = None, own and own * 2, own and own // 2
        changes += [{"sharding": "fsdp", "shard_degree": degree} for degree in degrees]
        changes.append({"sharding": "fsdp", "shard_degree": profile.cluster.devices_per_node // self.tensor})
        changes.append({"sharding": "zero1", "shard_degree": None})
        if self.tensor > 1:  # what a smaller tensor group leaves to hold, other axes divide
            for name in ("context", "pipeline"):
                changes.append({"tensor": self.tensor // 2, name: 2 * getattr(self, name)})
        if self.pipeline > 1:
            changes.append({"pipeline": self.pipeline // 2, "stages": 2 * self.stages})
        seen = {self}
        for change in changes:
            other = replace(self, **change)
            if other.pipeline == 1:
                other = replace(other, stages=1)
            if other not in seen and other.is_possible(profile):
                seen.add(other)
                yield other

    def _nearby(self, profile: Profile) -> dict[str, set[int]]:
        def doubled(value: int) -> set[int]:
            return {2 * value, value // 2} - {0}

        nearby = {
            name: doubled(getattr(self, name)) for name in ("tensor", "pipeline", "context", "microbatch")
        }
        nearby["stages"] = {*doubled(self.stages), self.stages + 1, self.stages - 1} - {0}
        if profile.model.num_experts is not None:
            nearby["expert"] = doubled(self.expert)
        return nearby

    def is_possible(self, profile: Profile) -> bool:
        """Whether degrees divide what they must; the profile's rules reject the rest."""
        model, train = profile.model, profile.train
        ranks, rest = divmod(profile.world_size, self.tensor * self.pipeline * self.context)
        if rest or self.tensor > profile.cluster.devices_per_node:
            return False
        shards = ranks * self.context
        return (
            self.tensor in model.tensor_degrees
            and self.stages * self.pipeline <= model.num_hidden_layers
            and (self.context == 1 or train.sequence_length // self.context >= LEAST_CONTEXT_TOKENS)
            and train.global_batch_size % (ranks * self.microbatch) == 0
            and (
                self.shard_degree is None
                or (1 < self.shard_degree < shards and shards % self.shard_degree == 0)
            )
            and (model.num_experts is None or self.expert in valid_expert_degrees(model.num_experts, shards))
        )


@dataclass(frozen=True)
class Topology:
    """A topology that fits: the profile keys to set (None to derive a key again) and its plan."""

    overrides: dict[str, Any]
    plan: Plan


@dataclass(frozen=True)
class RejectedDegrees:
    """Degrees without a usable topology for any sharding."""

    degrees: dict[str, int]
    reason: str  # the violated rule, starting with the rejected key and value; or "memory"
    needs: int | None = None  # least bytes that the fullest rank needs, if memory is the reason


def search(profile: Profile, vary: bool = False) -> tuple[list[Topology], list[RejectedDegrees]]:
    """The best topology of each combination that fits, fastest first, and the rejected degrees.

    On devices of unknown speed, topologies are ordered by communication volume.

    Args:
        vary: whether to change the fastest ones step by step, their microbatches and schedule included (`refine`).
    """
    cache: CostCache = {}
    topologies: list[Topology] = []
    rejected: list[RejectedDegrees] = []
    combinations = [*_degrees(profile)]
    bounds = [0.0] * len(combinations)
    if len(combinations) > MANY:
        keys = [{f"parallel.{name}": size for name, size in degrees.items()} for degrees in combinations]
        bounds = [_least_seconds(profile, each, cache) if len(each) > 1 else 0.0 for each in keys]
        combinations = [combinations[i] for i in np.argsort(bounds, kind="stable")]
        bounds.sort()
    for degrees, bound in zip(combinations, bounds, strict=True):
        if topologies and bound > SLOW * min(map(_seconds, topologies)):
            rejected.append(RejectedDegrees(degrees, SLOWER))
            continue
        tried = [_best(profile, degrees, sharding, cache) for sharding in _shardings(profile, degrees)]
        fitting = [each for each in tried if isinstance(each, Topology)]
        topologies += fitting
        if not fitting:
            failed = [each for each in tried if isinstance(each, RejectedDegrees)]
            rejected.append(min(failed, key=lambda each: math.inf if each.needs is None else each.needs))
    topologies.sort(key=_order)
    if vary and topologies and topologies[0].plan.step_seconds is not None:
        known = {Variation.of(profile, each.overrides) for each in topologies}
        refined = refine(profile, topologies[:STARTS], cache)
        topologies += [each for place, each in refined.items() if place not in known]
        topologies.sort(key=_order)
    return topologies, rejected


def _order(topology: Topology) -> tuple[float, int]:
    """Step time to four digits, then memory: of equally fast ones, the one that needs less is first."""
    return float(f"{_seconds(topology):.4g}"), topology.plan.needs


def _seconds(topology: Topology) -> float:
    """Seconds of a step; on devices of unknown speed, the bytes that it sends."""
    return topology.plan.step_seconds or sum(topology.plan.communication.values())


def _least_seconds(profile: Profile, keys: dict[str, Any], cache: CostCache) -> float:
    """Seconds that a step takes at least; 0 if that is unknown or the keys are invalid.

    Its layers without recomputation, and the bubble.
    """
    candidate = profile
    for key, value in {**_reset_derived(profile), **keys, "train.recompute": "none"}.items():
        candidate = with_value(candidate, key, value)
    model, parallel, layers = candidate.model, candidate.parallel, candidate.model.num_hidden_layers
    if device_of(candidate).peak(candidate.train.precision) is None or layers < 3 or not passes(candidate):
        return 0.0
    middle = layers - 2
    seconds = layer_seconds(candidate, StageCosts(candidate, cache).layer(middle, "none"), overlaps=True)
    kinds = (model.window, model.has_experts, model.is_linear, model.has_rope)
    alike = sum(all(kind(each) == kind(middle) for kind in kinds) for each in range(layers))
    count, stages = candidate.accumulation_steps, len(partition_layers(candidate))
    idle = bubble(parallel.schedule, parallel.pipeline, count, stages // parallel.pipeline)
    return count * alike / parallel.pipeline * seconds * (1 + idle)


def refine(profile: Profile, starts: Sequence[Topology], cache: CostCache) -> dict[Variation, Topology]:
    """The topologies that result from changing each start as long as that makes its step shorter."""
    planned: dict[Variation, Topology | None] = {}

    def at(variation: Variation, limit: float) -> Topology | None:
        """The topology of a variation, planned if its step may take less than `limit`."""
        if variation not in planned:
            keys = variation.keys(profile)
            if _least_seconds(profile, keys, cache) >= limit:
                return None
            found = plan_keys(profile, keys, cache)
            planned[variation] = found if isinstance(found, Topology) else None
        return planned[variation]

    ends: dict[Variation, Topology] = {}
    for start in starts:
        best, place = start, Variation.of(profile, start.overrides)
        while len(planned) < VARIATIONS:
            limit = (1 - GAIN) * _seconds(best)
            tried = [(found, each) for each in place.neighbours(profile) if (found := at(each, limit))]
            nearest = min(tried, key=lambda pair: _order(pair[0]), default=None)
            if nearest is None or _seconds(nearest[0]) > limit:
                break
            best, place = nearest
        if best is not start:
            ends[place] = best
    return ends


def neighbours(profile: Profile) -> list[Topology]:
    """Topologies that fit at half and twice the tensor degree, all else equal; takes about a second."""
    cache: CostCache = {}
    settings = profile.parallel.model_dump()
    kept = {key: settings[key] for key in ("pipeline", "context", "data_sharding", "keep_gathered")}
    tensor = profile.parallel.tensor
    degrees = [n for n in (tensor // 2, 2 * tensor) if 0 < n <= profile.cluster.devices_per_node]
    tried = [_best(profile, {"tensor": n}, {**kept, "shard_degree": None}, cache) for n in degrees]
    return [each for each in tried if isinstance(each, Topology)]


def _shardings(profile: Profile, degrees: dict[str, int]) -> Iterator[dict[str, Any]]:
    """The ways to shard states over the data and context ranks."""
    yield {"data_sharding": "zero1", "shard_degree": None, "keep_gathered": False}
    ranks = profile.world_size // (degrees["tensor"] * degrees.get("pipeline", 1))  # data × context
    if len(degrees) == 1 or ranks == 1:
        return
    in_node = profile.cluster.devices_per_node // degrees["tensor"]
    hybrid = in_node if 1 < in_node < ranks and ranks % in_node == 0 else None
    for degree in (None, *([hybrid] if hybrid else [])):
        yield {"data_sharding": "fsdp", "shard_degree": degree, "keep_gathered": AUTO}


def _degrees(profile: Profile) -> Iterator[dict[str, int]]:
    model, cluster, world = profile.model, profile.cluster, profile.world_size
    valid = model.tensor_degrees
    powers = _powers(cluster.devices_per_node)
    contexts = _powers(profile.train.sequence_length // CONTEXT_TOKENS) | {1, profile.parallel.context}
    for tensor in sorted({t for t in powers | set(valid) if t <= cluster.devices_per_node}):
        if tensor not in valid:
            yield {"tensor": tensor}
            continue
        for pipeline, context in product(range(1, world // tensor + 1), sorted(contexts)):
            if world % (tensor * pipeline * context) == 0:
                combined = {"tensor": tensor, "pipeline": pipeline, "context": context}
                if model.num_experts is None:
                    yield combined
                    continue
                for expert in valid_expert_degrees(model.num_experts, world // (tensor * pipeline)):
                    yield {**combined, "expert": expert}


def _best(
    profile: Profile, degrees: dict[str, int], sharding: dict[str, Any], cache: CostCache
) -> Topology | RejectedDegrees:
    """The combination's topology with the least recomputation that fits, or why there is none."""
    keys = {f"parallel.{key}": value for key, value in (degrees | sharding).items()}
    found = plan_keys(profile, keys, cache)
    return found if isinstance(found, Topology) else RejectedDegrees(degrees, *found)


def plan_keys(profile: Profile, keys: dict[str, Any], cache: CostCache) -> Topology | tuple[str, int | None]:
    """The topology of these keys with the least recomputation that fits.

    Returns:
        Otherwise the rule that they break, or "memory", and the bytes that they need.
    """
    rule, needs = "", None
    for mode in ("none", "auto"):
        overrides = {**_reset_derived(profile), **keys, "train.recompute": mode}
        candidate = profile
        for key, value in overrides.items():
            candidate = with_value(candidate, key, value)
        if error := broken_rule(candidate):
            rule = rule or str(ProfileError(error.key, error.value, error.reason))
            continue
        room = (1 - device_of(candidate).reserve) * device_bytes(candidate)
        if (least := memory.least_bytes(candidate)) > room:
            return "memory", int(least)
        candidate = resolve_auto(candidate, cache)
        planned = plan(candidate, cache)
        if planned.fits:
            overrides["train.recompute"] = candidate.train.recompute
            overrides["parallel.keep_gathered"] = candidate.parallel.keep_gathered
            return Topology(overrides, planned)
        needs = planned.needs
    return rule if needs is None else "memory", needs


def explain(topologies: Sequence[Topology], rejected: Sequence[RejectedDegrees]) -> list[str]:
    """Clauses on why the first topology is the best: its groups' links, and how alternatives compare."""
    best, *others = topologies
    mesh, levels, sharding = best.plan.mesh, best.plan.levels, best.overrides["parallel.data_sharding"]
    where = {"chip": "on one chip", "node": "inside a node", "network": "across nodes"}
    reasons = []
    if mesh["tensor"] > 1:
        reasons.append(f"tensor {mesh['tensor']} communicates {where[levels['tensor']]}")
    if mesh["pipeline"] > 1:
        reasons.append(f"pipeline {mesh['pipeline']} leaves a bubble of {best.plan.bubble:.1%}")
    if "data" in levels:
        ranks = best.overrides["parallel.shard_degree"] or mesh["data"] * mesh["context"]
        kind = {"zero1": "ZeRO-1 shards states", "fsdp": "FSDP shards weights and states"}[sharding]
        reasons.append(f"{kind} over {ranks} ranks {where[levels['data']]}")
    smaller = [other for other in others if other.plan.mesh["tensor"] < mesh["tensor"]]
    larger = [other for other in others if other.plan.mesh["tensor"] > mesh["tensor"]]
    below = {each.reason for each in rejected if each.degrees["tensor"] < mesh["tensor"]}
    if not smaller and "memory" in below and SLOWER not in below:
        reasons.append("smaller tensor degrees do not fit")
    reasons += [_compared(side[0], best) for side in (smaller, larger) if side]
    for other in others:
        if other.plan.mesh == mesh and other.overrides["parallel.data_sharding"] != sharding:
            gib = f"{other.plan.needs / 2**30:.1f} instead of {best.plan.needs / 2**30:.1f} GiB"
            name = {"zero1": "ZeRO-1", "fsdp": "FSDP"}[other.overrides["parallel.data_sharding"]]
            reasons.append(f"{name} with the same degrees is {_slower(other, best)} and needs {gib}")
            break
    else:
        if sharding == "fsdp":
            reasons.append("with ZeRO-1 the same degrees do not fit")
    return reasons


def _compared(other: Topology, best: Topology) -> str:
    """A clause on a topology of another tensor degree: its speed, and its recomputation if different."""
    because = other_recomputation(other, best.overrides["train.recompute"])
    return f"tensor {other.plan.mesh['tensor']} is {_slower(other, best)}{because and f', {because}'}"


def other_recomputation(topology: Topology, recompute: Recompute) -> str:
    """'with selective recomputation' if that differs from `recompute`, else ''."""
    if (own := topology.overrides["train.recompute"]) == recompute:
        return ""
    modes = " and ".join(mode for mode in MODES[1:] if mode in modes_of(own))
    return f"with {modes} recomputation" if modes else "without recomputation"


def _slower(other: Topology, best: Topology) -> str:
    """'9% slower' or 'as fast'; a comparison of communication volumes where times are unknown."""
    if other.plan.step_seconds is None or best.plan.step_seconds is None:
        return "no better in communication volume"
    return compared_pace(other.plan.step_seconds / best.plan.step_seconds)


def compared_pace(ratio: float) -> str:
    """A ratio of step times in words: '9% slower', '5% faster', '12 times as slow', 'as fast'."""
    percent = round(100 * (ratio - 1))
    if percent >= 200:
        return f"{ratio:.0f} times as slow"
    return f"{abs(percent)}% {'slower' if percent > 0 else 'faster'}" if percent else "as fast"


def _reset_derived(profile: Profile) -> dict[str, None]:
    """Overrides that reset keys that the profile sets for its own degrees, so they are derived again."""
    return {key: None for key in DERIVED if get_value(profile, key) is not None}


def _powers(limit: int) -> set[int]:
    """Powers of two up to the limit."""
    return {2**i for i in range(limit.bit_length())}
