"""Summaries of a plan, a run's inputs and a cluster in one line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from profiles.errors import counted
from profiles.schema import Profile
from tasks.reporting.format import format_bytes, format_count, format_mesh, format_step_time, format_time

if TYPE_CHECKING:  # the planner imports torch, which `trainshed profiles` must not
    from modeling.planning.planner import Plan
    from tasks.inputs import Inputs


def plan_summary(planned: Plan) -> str:
    """Parameters, mesh, the fullest rank's memory and, if known, the step time of a plan, in one line."""
    parts = [
        f"{format_count(planned.parameters)} parameters on {format_mesh(planned.mesh)}",
        f"{format_bytes(planned.needs)} of {format_bytes(planned.device_bytes)} per device",
    ]
    if planned.step_seconds:
        parts.append(f"about {format_step_time(planned.step_seconds)} per step")
    return ", ".join(parts)


def inputs_summary(inputs: Inputs) -> str:
    """Number of shards and when the lockfile pinned them: '12 shards of data, as of 2026-03-01 10:00 UTC'."""
    since = f", as of {format_time(inputs.since)}" if inputs.since else ""
    return f"{counted(len(inputs.shards), 'shard')} of data{since}"


def cluster_summary(profile: Profile) -> str:
    """Nodes and devices: '8 × 64 trn2'."""
    cluster = profile.cluster
    return f"{cluster.nodes} × {cluster.devices_per_node} {cluster.accelerator or cluster.device}"
