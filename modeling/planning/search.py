"""Which topologies a cluster could train a model on, the fastest first, and why the others cannot.

A family is a tensor degree (the valid ones within a node, and powers of two to say why they are not), a pipeline degree that
divides what is left, and a context degree where sequences are long; of each the least recomputation that fits is taken. Nodes,
devices, batches, sequence and schedule stay as the profile has them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from modeling.planning.planner import Plan, plan
from modeling.planning.stage_costs import Counted
from parallel.activation_checkpointing import MODES
from parallel.constraints import valid_tensor_degrees
from profiles.check import changed, check, value_of
from profiles.errors import ProfileError
from profiles.schema import Profile

DERIVED = ("parallel.kv_replication", "parallel.pipeline_cuts", "train.recompute_layers")
LONG = 8192  # tokens a context rank should have, at least


@dataclass(frozen=True)
class Topology:
    """One that fits: what to set, None for what is to be derived again, and its plan."""

    overrides: dict[str, Any]
    plan: Plan


@dataclass(frozen=True)
class Rejected:
    """A family of which none can be used.

    Attributes:
        degrees: its own.
        reason: the rule that it breaks, in words that begin with the refused key and value; or "memory".
        needs: bytes on the fullest rank with all recomputation, where memory is the reason.
    """

    degrees: dict[str, int]
    reason: str
    needs: int | None = None


def search(profile: Profile) -> tuple[list[Topology], list[Rejected]]:
    """One topology of every family that fits, best first (where speed is not known, those that send least), and the others."""
    counted: Counted = {}
    found: list[Topology] = []
    rejected: list[Rejected] = []
    for degrees in _families(profile):
        result = _family(profile, degrees, counted)
        (found if isinstance(result, Topology) else rejected).append(result)
    found.sort(key=lambda topology: topology.plan.step_seconds or sum(topology.plan.sent.values()))
    return found, rejected


def _families(profile: Profile) -> Iterator[dict[str, int]]:
    model, cluster, world = profile.model, profile.cluster, profile.world_size
    valid = valid_tensor_degrees(model.num_attention_heads, model.num_key_value_heads)
    powers = {2**i for i in range(cluster.devices_per_node.bit_length())}
    for tensor in sorted({t for t in powers | set(valid) if t <= cluster.devices_per_node}):
        if tensor not in valid:
            yield {"tensor": tensor}
            continue
        for pipeline, context in product(_divisors(world // tensor), (1, 2, 4, 8)):
            long = profile.train.sequence_length // context >= LONG or context in (
                1,
                profile.parallel.context,
            )
            if long and world % (tensor * pipeline * context) == 0:
                yield {"tensor": tensor, "pipeline": pipeline, "context": context}


def _family(profile: Profile, degrees: dict[str, int], counted: Counted) -> Topology | Rejected:
    """What of a family fits; or the rule that none keeps, or how much the smallest needs."""
    rule, needs = "", None
    for mode in MODES:
        overrides = {f"parallel.{axis}": degree for axis, degree in degrees.items()}
        overrides |= {"train.recompute": mode, **_derived(profile)}
        candidate = profile
        for key, value in overrides.items():
            candidate = changed(candidate, key, value)
        try:
            check(candidate)
        except ProfileError as error:
            rule = rule or str(ProfileError(error.key, error.value, error.reason))
            continue
        planned = plan(candidate, counted)
        if planned.fits:
            return Topology(overrides, planned)
        needs = planned.needs
    return Rejected(degrees, rule if needs is None else "memory", needs)


def _derived(profile: Profile) -> dict[str, None]:
    """What the profile sets that depends on its own degrees, to be derived from others."""
    return {key: None for key in DERIVED if value_of(profile, key) is not None}


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
