"""How long a step takes, from what its ranks multiply and send and the device's figures.

    work      of a rank: FLOPs / (peak · MATRIX) + bytes of tensor and context exchanges / (wire · WIRE)
    step      slowest rank's work · (1 + bubble) + exchange of gradients and weights / (wire · WIRE)

The wire is the links inside a node where all ranks of a group sit on one, else a device's share of the node's network.
Against AWS's eight published throughputs on trn1 (tests/modeling/test_planner.py) the estimate is 0.85 to 1.09 of them.
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

MATRIX = 0.55  # of the peak, that layers reach between exchanges
WIRE = 0.6  # of the wire's speed, that large exchanges reach
DAY = 24 * 3600


class Work(Protocol):
    """What one rank does in a step."""

    flops: float
    sent: Mapping[str, int]


@dataclass(frozen=True)
class Estimate:
    """See `planner.Plan`."""

    bubble: float
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    days: float | None = None
    node_hours: float | None = None
    price: float | None = None
    assumptions: tuple[str, ...] = ()


def estimate(profile: Profile, ranks: Sequence[Work], each: int) -> Estimate:
    """Times of a step and of the whole run.

    Args:
        ranks: one at each place of the pipeline.
        each: stages that each of them has.
    """
    parallel, train, cluster = profile.parallel, profile.train, profile.cluster
    waiting = bubble(parallel.schedule, parallel.pipeline, profile.accumulation_steps, each)
    device = devices.resolve(cluster.device, cluster.accelerator)
    peak = device.peak(train.precision)
    if peak is None or device.link is None or device.network is None:
        return Estimate(waiting)
    wires = {axis: _wire(profile, device, axis) for axis in ranks[0].sent}
    seconds = [{axis: sent / (wires[axis] * WIRE) for axis, sent in rank.sent.items()} for rank in ranks]
    work = max(
        rank.flops / (peak * MATRIX) + sending["tensor"] + sending["context"]
        for rank, sending in zip(ranks, seconds, strict=True)
    )
    step = work * (1 + waiting) + max(sending["data"] for sending in seconds)
    tokens = train.global_batch_size * train.sequence_length
    seconds_in_all = step * train.steps if train.steps else None
    hours = seconds_in_all and seconds_in_all / 3600 * cluster.nodes
    link, network = device.link / 1e9, device.network / 1e9
    return Estimate(
        waiting,
        step,
        tokens / step,
        tokens / step * flops_per_token(profile) / (peak * profile.world_size),
        seconds_in_all and seconds_in_all / DAY,
        hours,
        hours and cluster.node_price and hours * cluster.node_price,
        (
            f"matrix products at {MATRIX:.0%} of {peak / 1e12:g} TFLOP/s a device",
            f"exchanges at {WIRE:.0%} of {link:.0f} GB/s inside a node, of {network:.1f} GB/s between nodes",
            "pipeline messages are hidden behind work, exchanges of gradients and weights are not",
            "evaluations, checkpoints and restarts are left out",
        ),
    )


def _wire(profile: Profile, device: Device, axis: str) -> float:
    """Bytes a second over which an axis's groups exchange."""
    parallel = profile.parallel
    span = parallel.tensor
    if axis in ("context", "data"):
        span *= parallel.context
    if axis == "data":
        span *= profile.data_parallel
    if axis == "pipeline":
        span = profile.world_size
    return device.link if span <= profile.cluster.devices_per_node else device.network
