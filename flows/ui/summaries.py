"""Summaries of a plan, a mesh and a cluster in one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from profiles.schema import Profile
from tasks.reporting.format import format_bytes, format_count, format_duration

if TYPE_CHECKING:  # it imports torch, and `trainshed profiles` does not
    from modeling.planning.planner import Plan
    from tasks.resolve import Inputs


def plan_summary(planned: Plan) -> str:
    """Parameters, mesh, memory of the fullest rank, step time: '8 billion parameters on tensor 8, 61 GiB of 96 GiB a device'."""
    parts = [
        f"{format_count(planned.parameters)} parameters on {mesh_summary(planned.mesh)}",
        f"{format_bytes(planned.needs)} of {format_bytes(planned.device_bytes)} a device",
    ]
    if planned.step_seconds:
        parts.append(f"about {format_duration(planned.step_seconds)} a step")
    return ", ".join(parts)


def inputs_summary(inputs: Inputs) -> str:
    """Number of shards, and since when the run's lock has them: '12 shards, as of 2026-03-01 10:00'."""
    since = f", as of {inputs.since[:16].replace('T', ' ')} UTC" if inputs.since else ""
    count = len(inputs.shards)
    return f"{count:,} shard{'s' * (count != 1)} of data{since}"


def mesh_summary(degrees: Mapping[str, int]) -> str:
    """The axes above 1, outermost first: 'pipeline 2 × tensor 8'."""
    return " × ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1) or "one process"


def cluster_summary(profile: Profile) -> str:
    """Nodes and devices: '8 × 64 trn2'."""
    cluster = profile.cluster
    return f"{cluster.nodes} × {cluster.devices_per_node} {cluster.accelerator or cluster.device}"
