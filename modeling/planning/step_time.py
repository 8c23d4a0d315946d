"""Step time, estimated from ranks' FLOPs, communication and memory traffic.

    work      of a rank: FLOPs / rate + bytes of tensor, context and expert communication / bandwidth + bytes that it accesses to
              accumulate gradients / memory bandwidth
    step      slowest rank's work · (1 + bubble) + exposed exchange of gradients and weights + bytes that its update accesses /
              memory bandwidth + FLOPs of its update (Muon) / rate

`rate` is measured by shape or 0.55 of the published peak (calibration.py), the bandwidth is that of a group's slowest links
(levels.py), the memory bandwidth is measured or 0.8 of the published one. ZeRO-1 exchanges after the last microbatch; FSDP
overlaps gathering weights and scattering gradients with the compute of every microbatch, so that only the excess is exposed.
Uncalibrated estimates are 0.91 to 1.13 of AWS's eight published throughputs on trn1 (tests/modeling/planning/test_planner.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from modeling.models.build import device_of
from modeling.models.flops import flops_per_token
from modeling.planning import calibration
from modeling.planning.calibration import PEAK_SHARE, product_precision
from modeling.planning.levels import bandwidth, level
from modeling.planning.stage_costs import LayerCosts
from parallel.pipeline.schedules import bubble
from profiles.schema import Profile

# Seconds of a step at the devices' peak. Shorter steps are dominated by kernel launches and latencies, which are not modelled.
MIN_SECONDS = 0.01
DAY = 24 * 3600


class RankCosts(Protocol):
    """A rank's work in a step.

    Attributes:
        flops, rate: FLOPs and the layers' FLOP/s; None: unknown.
        communication: bytes that it sends, by mesh axis.
        accumulated, updated: bytes of memory that the optimizer accesses during and after the microbatches.
        update_flops: FLOPs of its matrix products, at the layers' rate.
    """

    flops: float
    rate: float | None
    communication: Mapping[str, int]
    accumulated: int
    updated: int
    update_flops: float


@dataclass(frozen=True)
class Estimate:
    """Times and cost of a run; the attributes are those of `planner.Plan`."""

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
    """Average FLOP/s of layers, including their other operators; None if the device's speed is unknown."""
    precision, table = profile.train.precision, calibration.find(profile)
    device = device_of(profile)
    if table is None and (precision != "fp8" or device.peak("bf16") is None):
        peak = device.peak(precision)
        return peak and peak * PEAK_SHARE

    def seconds(layer: LayerCosts) -> float:
        if table is not None:
            return table.seconds(precision, layer.products, layer.moved)
        peaks = ((device.peak(product_precision(precision, shape)), n) for shape, n in layer.products.items())
        return sum(n / (peak * PEAK_SHARE) for peak, n in peaks)

    counts = Counter(map(id, layers))
    distinct = {id(layer): layer for layer in layers}
    flops = sum(layer.flops * counts[key] for key, layer in distinct.items())
    return flops / sum(seconds(layer) * counts[key] for key, layer in distinct.items())


def layer_seconds(profile: Profile, layer: LayerCosts) -> float:
    """Estimated seconds of a microbatch in a layer; in an arbitrary unit if the device's speed is unknown."""
    seconds = layer.flops / (layer_rate(profile, [layer]) or 1.0)
    for kind, size in layer.communication.items():
        speed = bandwidth(profile, "tensor" if kind == "kv_replica" else kind)
        seconds += size / speed if speed else 0.0
    return seconds


def estimate(profile: Profile, ranks: Sequence[RankCosts], stages_per_rank: int) -> Estimate:
    """Times of a step and of the run.

    Args:
        ranks: costs of each pipeline rank.
        stages_per_rank: more than one with interleaving.
    """
    parallel, train, cluster = profile.parallel, profile.train, profile.cluster
    idle = bubble(parallel.schedule, parallel.pipeline, profile.accumulation_steps, stages_per_rank)
    basis = calibration.basis(profile)
    speeds = {
        axis: bandwidth(profile, axis) for rank in ranks for axis, size in rank.communication.items() if size
    }
    memory = calibration.memory_bandwidth(profile)
    unknown = memory is None or any(rank.rate is None for rank in ranks) or None in speeds.values()
    if unknown or is_too_short(profile):
        return Estimate(idle, basis)

    def seconds(rank: RankCosts, *axes: str) -> float:
        return sum(rank.communication[axis] / speeds[axis] for axis in axes if rank.communication.get(axis))

    works = [
        rank.flops / rank.rate + seconds(rank, "tensor", "context", "expert") + rank.accumulated / memory
        for rank in ranks
    ]
    hidden = 0.0  # share of the work with which the exchange of weights and gradients overlaps
    if parallel.data_sharding == "fsdp":
        hidden = 1 / profile.accumulation_steps if parallel.keep_gathered else 1.0
    exposed = max(
        max(0.0, seconds(rank, "data", "expert_data") - hidden * work)
        + seconds(rank, "replica", "expert_replica")
        for rank, work in zip(ranks, works, strict=True)
    )
    update = max(rank.updated / memory + rank.update_flops / rank.rate for rank in ranks)
    step = max(works) * (1 + idle) + exposed + update
    tokens = profile.step_tokens
    total = step * train.steps if train.steps else None
    hours = total and total / 3600 * cluster.nodes
    peak = device_of(profile).peak(train.precision)
    return Estimate(
        idle,
        basis,
        step,
        tokens / step,
        peak and tokens / step * flops_per_token(profile) / (peak * profile.world_size),
        total and total / DAY,
        hours,
        hours and cluster.node_price and hours * cluster.node_price,
        _assumptions(profile, speeds, memory, ranks),
    )


def is_too_short(profile: Profile) -> bool:
    """Whether model and batch are too small to estimate a step's time from FLOPs and bytes."""
    peak = device_of(profile).peak(profile.train.precision)
    flops = flops_per_token(profile) * profile.step_tokens
    return peak is not None and flops / (peak * profile.world_size) < MIN_SECONDS


def _assumptions(
    profile: Profile, speeds: Mapping[str, float | None], memory: float, ranks: Sequence[RankCosts]
) -> tuple[str, ...]:
    peak = device_of(profile).peak(profile.train.precision)
    share = f", {rate / peak:.0%} of {peak / 1e12:g}" if peak and (rate := ranks[0].rate) else ""
    links = ", ".join(
        f"{axis} {speed / 1e9:.3g} GB/s ({level(profile, axis)})" for axis, speed in speeds.items() if speed
    )
    published = device_of(profile).bandwidth
    of_published = f", {memory / published:.0%} of {published / 1e9:,.0f}" if published else ""
    exchange = "do not"
    if profile.parallel.data_sharding == "fsdp":
        exchange = "overlap with compute, up to its duration"
    return (
        f"layers at {ranks[0].rate / 1e12:.3g} TFLOP/s per device{share}",
        f"optimizer at {memory / 1e9:,.0f} GB/s of memory per device{of_published}",
        *([f"communication per device: {links}"] if links else []),
        f"pipeline messages overlap with compute; exchanges of gradients and weights {exchange}",
        "evaluations, checkpoints and restarts are not included",
    )
