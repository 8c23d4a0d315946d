"""Step time: estimated from each rank's FLOPs, its communication volume and the speeds of the device and its links.

    work      of a rank: FLOPs / rate + bytes of tensor, context and expert communication / bandwidth
    step      slowest rank's work · (1 + bubble) + what is left of the exchange of gradients and weights

`rate` is measured by shape or 0.55 of the published peak (calibration.py), the bandwidth that of the slowest links of a
group (levels.py). ZeRO-1 exchanges after the last microbatch; FSDP gathers weights and scatters gradients beside the
compute of every microbatch, so that only what exceeds it counts. The uncalibrated estimate is 0.95 to 1.18 of AWS's eight
published throughputs on trn1 (tests/modeling/planning/test_planner.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from modeling.models.flops import flops_per_token
from modeling.planning import calibration
from modeling.planning.calibration import PEAK_SHARE
from modeling.planning.levels import bandwidth, level
from modeling.planning.stage_costs import LayerCosts
from parallel import device as devices
from parallel.pipeline.schedules import bubble
from profiles.schema import Profile

# Seconds of a step at the devices' peak. Of shorter ones kernel launches and latencies, which are not modelled, take most.
SHORTEST = 0.01
DAY = 24 * 3600


class RankCosts(Protocol):
    """What one rank does in a step: FLOPs, FLOP/s that they reach (None: unknown), and bytes sent by mesh axis."""

    flops: float
    rate: float | None
    sent: Mapping[str, int]


@dataclass(frozen=True)
class Estimate:
    """Times and cost of a run, with the attributes of `planner.Plan`."""

    bubble: float
    basis: str
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    days: float | None = None
    node_hours: float | None = None
    price: float | None = None
    assumptions: tuple[str, ...] = ()


def layer_rate(profile: Profile, layers: Sequence[LayerCosts]) -> float | None:
    """FLOP/s that layers reach on average, their other operators included; None if the device's speed is unknown."""
    train, cluster = profile.train, profile.cluster
    table = calibration.find(profile)
    if table is None:
        peak = devices.resolve(cluster.device, cluster.accelerator).peak(train.precision)
        return peak and peak * PEAK_SHARE
    counts = Counter(map(id, layers))
    distinct = {id(layer): layer for layer in layers}
    flops = sum(layer.flops * counts[key] for key, layer in distinct.items())
    seconds = sum(
        table.seconds(train.precision, layer.products, layer.moved) * counts[key]
        for key, layer in distinct.items()
    )
    return flops / seconds


def layer_seconds(profile: Profile, layer: LayerCosts) -> float:
    """Seconds of a microbatch in a layer, as a step's are estimated; in an arbitrary unit if the device's speed is unknown."""
    seconds = layer.flops / (layer_rate(profile, [layer]) or 1.0)
    for kind, sent in layer.sent.items():
        speed = bandwidth(profile, "tensor" if kind == "kv_replica" else kind)
        seconds += sent / speed if speed else 0.0
    return seconds


def estimate(profile: Profile, ranks: Sequence[RankCosts], stages_per_rank: int) -> Estimate:
    """Times of a step and of the run.

    Args:
        ranks: one per pipeline rank.
        stages_per_rank: more than one with interleaving.
    """
    parallel, train, cluster = profile.parallel, profile.train, profile.cluster
    idle = bubble(parallel.schedule, parallel.pipeline, profile.accumulation_steps, stages_per_rank)
    basis = calibration.basis(profile)
    speeds = {axis: bandwidth(profile, axis) for rank in ranks for axis, size in rank.sent.items() if size}
    if any(rank.rate is None for rank in ranks) or None in speeds.values() or is_too_short(profile):
        return Estimate(idle, basis)

    def seconds(rank: RankCosts, *axes: str) -> float:
        return sum(rank.sent[axis] / speeds[axis] for axis in axes if rank.sent.get(axis))

    works = [rank.flops / rank.rate + seconds(rank, "tensor", "context", "expert") for rank in ranks]
    hidden = 0.0  # share of the work beside which weights and gradients are exchanged
    if parallel.data_sharding == "fsdp":
        hidden = 1 / profile.accumulation_steps if parallel.keep_gathered else 1.0
    exposed = max(
        max(0.0, seconds(rank, "data") - hidden * work) + seconds(rank, "replica")
        for rank, work in zip(ranks, works, strict=True)
    )
    step = max(works) * (1 + idle) + exposed
    tokens = train.global_batch_size * train.sequence_length
    total = step * train.steps if train.steps else None
    hours = total and total / 3600 * cluster.nodes
    peak = devices.resolve(cluster.device, cluster.accelerator).peak(train.precision)
    return Estimate(
        idle,
        basis,
        step,
        tokens / step,
        peak and tokens / step * flops_per_token(profile) / (peak * profile.world_size),
        total and total / DAY,
        hours,
        hours and cluster.node_price and hours * cluster.node_price,
        _assumptions(profile, speeds, ranks),
    )


def is_too_short(profile: Profile) -> bool:
    """Whether the model and the batch are so small that a step's time cannot be estimated from FLOPs and bytes."""
    train, cluster = profile.train, profile.cluster
    peak = devices.resolve(cluster.device, cluster.accelerator).peak(train.precision)
    flops = flops_per_token(profile) * train.global_batch_size * train.sequence_length
    return peak is not None and flops / (peak * profile.world_size) < SHORTEST


def _assumptions(
    profile: Profile, speeds: Mapping[str, float | None], ranks: Sequence[RankCosts]
) -> tuple[str, ...]:
    device = devices.resolve(profile.cluster.device, profile.cluster.accelerator)
    peak = device.peak(profile.train.precision)
    share = f", {rate / peak:.0%} of {peak / 1e12:g}" if peak and (rate := ranks[0].rate) else ""
    links = ", ".join(
        f"{axis} {speed / 1e9:.3g} GB/s ({level(profile, axis)})" for axis, speed in speeds.items() if speed
    )
    exchange = "do not"
    if profile.parallel.data_sharding == "fsdp":
        exchange = "overlap with it as far as it lasts"
    return (
        f"layers at {ranks[0].rate / 1e12:.3g} TFLOP/s per device{share}",
        *([f"communication per device: {links}"] if links else []),
        f"pipeline messages overlap with compute; exchanges of gradients and weights {exchange}",
        "evaluations, checkpoints and restarts are not included",
    )
