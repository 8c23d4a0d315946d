"""Step time: estimated from each rank's FLOPs, communication volume and the device's published figures.

    work      of a rank: FLOPs / (peak · MATRIX) + bytes of tensor and context communication / (bandwidth · WIRE)
    step      slowest rank's work · (1 + bubble) + exchange of gradients and weights / (bandwidth · WIRE)

Bandwidth is that of the links inside a node if all ranks of a group are on one node, else a device's share of the
node's network. The estimate is 0.85 to 1.09 of AWS's eight published throughputs on trn1
(tests/modeling/planning/test_planner.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from modeling.models.flops import flops_per_token
from parallel import device as devices
from parallel.device import Device
from parallel.pipeline.schedules import bubble
from profiles.schema import Profile

MATRIX = 0.55  # share of peak FLOP/s that layers reach between collectives
WIRE = 0.6  # share of the bandwidth that large transfers reach
# Seconds of a step at the devices' peak. Of shorter ones kernel launches and latencies, which are not modelled, take most.
SHORTEST = 0.01
DAY = 24 * 3600


class RankCosts(Protocol):
    """What one rank does in a step: FLOPs, and bytes sent by mesh axis."""

    flops: float
    sent: Mapping[str, int]


@dataclass(frozen=True)
class Estimate:
    """Times and cost of a run, with the attributes of `planner.Plan`."""

    bubble: float
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    days: float | None = None
    node_hours: float | None = None
    price: float | None = None
    assumptions: tuple[str, ...] = ()


def estimate(profile: Profile, ranks: Sequence[RankCosts], stages_per_rank: int) -> Estimate:
    """Times of a step and of the run.

    Args:
        ranks: one per pipeline rank.
        stages_per_rank: more than one with interleaving.
    """
    parallel, train, cluster = profile.parallel, profile.train, profile.cluster
    idle = bubble(parallel.schedule, parallel.pipeline, profile.accumulation_steps, stages_per_rank)
    device = devices.resolve(cluster.device, cluster.accelerator)
    peak = device.peak(train.precision)
    if peak is None or device.link is None or device.network is None or is_too_short(profile):
        return Estimate(idle)
    bandwidth = {axis: _bandwidth(profile, device, axis) for axis in ranks[0].sent}
    seconds = [{axis: sent / (bandwidth[axis] * WIRE) for axis, sent in rank.sent.items()} for rank in ranks]
    work = max(
        rank.flops / (peak * MATRIX) + sending["tensor"] + sending["context"]
        for rank, sending in zip(ranks, seconds, strict=True)
    )
    step = work * (1 + idle) + max(sending["data"] for sending in seconds)
    tokens = train.global_batch_size * train.sequence_length
    total = step * train.steps if train.steps else None
    hours = total and total / 3600 * cluster.nodes
    link, network = device.link / 1e9, device.network / 1e9
    return Estimate(
        idle,
        step,
        tokens / step,
        tokens / step * flops_per_token(profile) / (peak * profile.world_size),
        total and total / DAY,
        hours,
        hours and cluster.node_price and hours * cluster.node_price,
        (
            f"matrix products at {MATRIX:.0%} of {peak / 1e12:g} TFLOP/s per device",
            f"communication at {WIRE:.0%} of {link:.0f} GB/s inside a node, of {network:.1f} GB/s between nodes",
            "pipeline messages overlap with compute; exchanges of gradients and weights do not",
            "evaluations, checkpoints and restarts are not included",
        ),
    )


def is_too_short(profile: Profile) -> bool:
    """Whether the model and the batch are so small that a step's time cannot be estimated from FLOPs and bytes."""
    train, cluster = profile.train, profile.cluster
    peak = devices.resolve(cluster.device, cluster.accelerator).peak(train.precision)
    flops = flops_per_token(profile) * train.global_batch_size * train.sequence_length
    return peak is not None and flops / (peak * profile.world_size) < SHORTEST


def _bandwidth(profile: Profile, device: Device, axis: str) -> float:
    """Bytes per second over which the groups of a mesh axis communicate."""
    parallel = profile.parallel
    span = parallel.tensor
    if axis in ("context", "data"):
        span *= parallel.context
    if axis == "data":
        span *= profile.data_parallel
    if axis == "pipeline":
        span = profile.world_size
    return device.link if span <= profile.cluster.devices_per_node else device.network
