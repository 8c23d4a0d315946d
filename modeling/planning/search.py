"""Topology search: which parallel degrees a cluster could train a model with, fastest first, and why others cannot.

A family is a tensor degree (the valid ones within a node, and powers of two to explain why they are invalid), a
pipeline degree that divides the remaining ranks, and a context degree where sequences are long. Each family uses the
least recomputation that fits. Nodes, devices, batch sizes, sequence length and schedule stay as in the profile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from modeling.planning.planner import Plan, plan
from modeling.planning.stage_costs import CostCache
from parallel.activation_checkpointing import MODES
from parallel.constraints import valid_tensor_degrees
from profiles.check import check, get_value, with_value
from profiles.errors import ProfileError
from profiles.schema import Profile

DERIVED = ("parallel.kv_replication", "parallel.pipeline_cuts", "train.recompute_layers")
LONG = 8192  # minimum tokens per context rank


@dataclass(frozen=True)
class Topology:
    """A topology that fits: the profile keys to set (None to derive a key again) and its plan."""

    overrides: dict[str, Any]
    plan: Plan


@dataclass(frozen=True)
class Rejected:
    """A family without a usable topology."""

    degrees: dict[str, int]  # of the family
    reason: str  # the violated rule, starting with the rejected key and value; or "memory"
    needs: int | None = None  # bytes on the fullest rank with full recomputation, if memory is the reason


def search(profile: Profile) -> tuple[list[Topology], list[Rejected]]:
    """The best topology of each family that fits, fastest first, and the rejected families.

    On devices of unknown speed the order is by communication volume.
    """
    cache: CostCache = {}
    topologies: list[Topology] = []
    rejected: list[Rejected] = []
    for degrees in _families(profile):
        result = _best(profile, degrees, cache)
        (topologies if isinstance(result, Topology) else rejected).append(result)
    topologies.sort(key=lambda topology: topology.plan.step_seconds or sum(topology.plan.sent.values()))
    return topologies, rejected


def _families(profile: Profile) -> Iterator[dict[str, int]]:
    model, cluster, world = profile.model, profile.cluster, profile.world_size
    valid = valid_tensor_degrees(model.num_attention_heads, model.num_key_value_heads)
    powers = {2**i for i in range(cluster.devices_per_node.bit_length())}
    for tensor in sorted({t for t in powers | set(valid) if t <= cluster.devices_per_node}):
        if tensor not in valid:
            yield {"tensor": tensor}
            continue
        for pipeline, context in product(_divisors(world // tensor), (1, 2, 4, 8)):
            allowed = profile.train.sequence_length // context >= LONG
            allowed |= context in (1, profile.parallel.context)
            if allowed and world % (tensor * pipeline * context) == 0:
                yield {"tensor": tensor, "pipeline": pipeline, "context": context}


def _best(profile: Profile, degrees: dict[str, int], cache: CostCache) -> Topology | Rejected:
    """The family's topology with the least recomputation that fits; or the violated rule or missing memory."""
    rule, needs = "", None
    for mode in MODES:
        overrides = {f"parallel.{axis}": degree for axis, degree in degrees.items()}
        overrides |= {"train.recompute": mode, **_reset_derived(profile)}
        candidate = profile
        for key, value in overrides.items():
            candidate = with_value(candidate, key, value)
        try:
            check(candidate)
        except ProfileError as error:
            rule = rule or str(ProfileError(error.key, error.value, error.reason))
            continue
        planned = plan(candidate, cache)
        if planned.fits:
            return Topology(overrides, planned)
        needs = planned.needs
    return Rejected(degrees, rule if needs is None else "memory", needs)


def _reset_derived(profile: Profile) -> dict[str, None]:
    """Resets the keys that the profile sets for its own degrees, so that they are derived again."""
    return {key: None for key in DERIVED if get_value(profile, key) is not None}


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
