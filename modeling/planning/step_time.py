"""Step time, estimated from ranks' FLOPs, communication and memory traffic.

    work      of a rank: FLOPs / rate + exchanges of tensor, context and expert groups + (bytes that it accesses to accumulate
              gradients) / memory bandwidth
    step      slowest rank's work · (1 + bubble) + exposed exchange of gradients and weights + (bytes that its update accesses) /
              memory bandwidth + (FLOPs of its update, with Muon) / rate

`rate` is measured by shape (calibration.py) or assumed (efficiency.py), the bandwidth is that of a group's slowest links
(links.py), the memory bandwidth is measured or 0.8 of the published one. FSDP overlaps gathering weights and scattering
gradients with the compute of every microbatch; on GPUs ZeRO-1 overlaps its exchange with the backward of the step's last
microbatch and the forward of the next step's first one, a ring's messages overlap with attention, sequence parallelism's
exchanges, apart from a chunk of each, with products (parallel/layers/overlap.py), and exchanges with experts as `beside_experts`
counts. Of what overlaps, only the excess is exposed (`exposed`, efficiency.py); on GPUs it also slows the compute down.
Uncalibrated estimates are 0.91 to 1.13 of AWS's eight published throughputs on trn1 (tests/modeling/planning/test_planner.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from modeling.models.build import DTYPES, device_of, overlap_chunks
from modeling.models.flops import flops_per_token
from modeling.planning import calibration, efficiency
from modeling.planning.efficiency import CONTENTION, OURS, Software, exposed, sent_share
from modeling.planning.links import bandwidth, level
from modeling.planning.stage_costs import LayerCosts
from parallel.layers.overlap import count_chunks
from parallel.mesh import Axis
from parallel.pipeline.schedules import bubble
from profiles.schema import Profile

# Seconds of a step at the devices' peak. Shorter steps are dominated by kernel launches and latencies, which are not modelled.
MIN_SECONDS = 0.01
DAY = 24 * 3600
# Share of sequence parallelism's collectives that FP8 overlaps: of a layer's five, it gathers dY of row-parallel products whole.
FP8_DIVIDED = 4 / 5
# Axes over which gradients and weights are exchanged: between shards, and between their replicas.
DATA, REPLICAS = ("data", "expert_data"), ("replica", "expert_replica")


@dataclass(frozen=True)
class StagePlan:
    """The fullest rank at one position of the pipeline."""

    layers: tuple[tuple[int, int], ...]  # (first, end) of each of its stages
    parameters: int  # of the model, each counted once over the tensor ranks
    bytes: dict[str, int]  # by kind
    flops: float  # of one rank in a step, recomputation and padding included
    rate: float | None  # its layers' FLOP/s; None if unknown
    attention: float  # share of its layers' time that attention takes; 0 if unknown
    communication: dict[str, int]  # bytes that one rank sends in a step, by mesh axis
    # bytes of memory that its optimizer reads and writes in a step: during the microbatches, and after the last one
    accumulated: int
    updated: int
    update_flops: float = 0.0  # of its optimizer's matrix products
    beside_experts: float = 0.0  # seconds of its exchanges with experts that overlap with compute, in a step

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


@dataclass(frozen=True)
class Estimate:
    """Times and cost of a run."""

    bubble: float  # pipeline bubble as a share of the working time
    basis: str  # what the times are based on (calibration.py)
    # None if the device's speed is unknown or the step is too short to estimate; days, node_hours and price also if the data
    # determines the run's length, and price if the profile has no node price:
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    days: float | None = None
    node_hours: float | None = None
    price: float | None = None
    assumptions: tuple[str, ...] = ()  # behind the times, one sentence each


def layer_speed(
    profile: Profile, layers: Sequence[LayerCosts], software: Software = OURS
) -> tuple[float | None, float]:
    """Average FLOP/s of layers, other operators included, and attention's share of their time.

    Returns:
        None and 0 if they are unknown.
    """
    counts = Counter(map(id, layers))
    distinct = {id(layer): layer for layer in layers}
    times = {key: _layer_times(profile, layer, software) for key, layer in distinct.items()}
    known = {key: found for key, found in times.items() if found}
    if len(known) < len(times):
        return None, 0.0
    flops = sum(layer.flops * counts[key] for key, layer in distinct.items())
    seconds, attention = (sum(known[key][i] * counts[key] for key in known) for i in (0, 1))
    return flops / seconds, attention / seconds


def _layer_times(profile: Profile, layer: LayerCosts, software: Software) -> tuple[float, float] | None:
    """Seconds of a microbatch in a layer, and those of attention in it, without exchanges; None: unknown."""
    precision, table = profile.train.precision, calibration.find(profile)
    if table is None:
        return efficiency.layer_seconds(profile, layer, software)
    attention = {shape: n for shape, n in layer.products.items() if shape[0] == "attention"}
    return table.seconds(precision, layer.products, layer.moved), table.seconds(precision, attention, 0)


def layer_seconds(profile: Profile, layer: LayerCosts, overlaps: bool = False) -> float:
    """Estimated seconds of a microbatch in a layer; in an arbitrary unit if the device's speed is unknown.

    Args:
        overlaps: leave out exchanges that may overlap with compute.
    """
    seconds = layer.flops / (layer_speed(profile, [layer])[0] or 1.0)
    hidden = {"context": 1.0, "tensor": overlapped_tensor_share(profile)} if overlaps else {}
    for kind, size in layer.communication.items():
        axis = "tensor" if kind == "kv_replica" else kind
        speed = bandwidth(profile, axis)
        exchange = size / speed * (1 - hidden.get(axis, 0.0)) if speed else 0.0
        if kind == "expert":
            exchange = exposed(exchange, beside_experts(profile, layer), device_of(profile))
        seconds += exchange
    return seconds


def beside_experts(profile: Profile, layer: LayerCosts, software: Software = OURS) -> float:
    """Seconds of a microbatch's exchanges with experts in a layer that overlap with compute (dropless.py).

    In forward, outputs return beside the shared experts; in backward, gradients (in graphs also rows) are sent beside theirs, and
    the rows' gradients return beside the products for the gradients of weights.
    """
    model, train, parallel = profile.model, profile.train, profile.parallel
    if software is not OURS or train.capacity_factor is not None or not layer.communication.get("expert"):
        return 0.0
    speed, rate = bandwidth(profile, "expert"), layer_speed(profile, [layer])[0]
    if not (device_of(profile).concurrent_collectives and speed and rate):
        return 0.0
    tokens = profile.micro_batch_rows * train.sequence_length // parallel.context
    rows = tokens * (model.num_experts_per_tok or 0)
    sent = rows * model.hidden_size * DTYPES[train.precision].itemsize * (1 - 1 / parallel.expert)
    exchange, row = sent / speed, 6 * model.hidden_size / parallel.tensor / rate  # of one width
    shared, weights = tokens * model.shared_width * row, rows * model.expert_width * row
    trained = profile.lora is None or profile.lora.rank is None
    return (
        min(exchange, shared)
        + min((2 if profile.compile.possible else 1) * exchange, 2 * shared)
        + (min(exchange, weights) if trained else 0)
    )


def estimate(
    profile: Profile, ranks: Sequence[StagePlan], stages_per_rank: int, software: Software = OURS
) -> Estimate:
    """Times of a step and of the run.

    Args:
        ranks: costs of each pipeline rank.
        stages_per_rank: more than one with interleaving.
        software: whose exchanges overlap.
    """
    parallel, train, cluster = profile.parallel, profile.train, profile.cluster
    idle = bubble(parallel.schedule, parallel.pipeline, profile.accumulation_steps, stages_per_rank)
    basis, device = efficiency.basis(profile), device_of(profile)
    axes = {axis: None for rank in ranks for axis, size in rank.communication.items() if size}
    speeds = {axis: speed for axis in axes if (speed := bandwidth(profile, axis)) is not None}
    rates = [rank.rate for rank in ranks if rank.rate is not None]
    memory = calibration.memory_bandwidth(profile)
    unknown = len(rates) < len(ranks) or len(speeds) < len(axes)
    if memory is None or unknown or is_too_short(profile):
        return Estimate(idle, basis)

    def seconds(rank: StagePlan, *axes: str) -> float:
        return sum(rank.communication[axis] / speeds[axis] for axis in axes if rank.communication.get(axis))

    def work(rank: StagePlan, rate: float, memory: float) -> float:
        compute = rank.flops / rate
        attention = compute * rank.attention
        # Else keys and values are gathered: FlexAttention has what flash attention has not.
        rings = device.architecture is not None and not (
            profile.document_masks or profile.model.attn_logit_softcapping or profile.model.sliding_window
        )
        experts = sent_share(profile, software) * seconds(rank, "expert")
        tensor = seconds(rank, "tensor")
        overlapping = tensor * overlapped_tensor_share(profile, software)
        return (
            compute
            + (tensor - overlapping)
            + exposed(overlapping, compute, device)
            + exposed(seconds(rank, "context"), attention if rings else 0, device)
            + exposed(experts, compute if "expert" in software.overlapped else rank.beside_experts, device)
            + rank.accumulated / memory
        )

    works = [work(rank, rate, memory) for rank, rate in zip(ranks, rates, strict=True)]
    # Share of the work with which the exchange of weights and gradients overlaps.
    hidden = 1 / profile.accumulation_steps if device.architecture else 0.0
    if parallel.data_sharding == "fsdp":
        hidden = 1 / profile.accumulation_steps if parallel.keep_gathered else 1.0
    beside, after = ((*DATA, *REPLICAS), ()) if device.architecture else (DATA, REPLICAS)
    exchanged = max(
        exposed(seconds(rank, *beside), hidden * each, device) + seconds(rank, *after)
        for rank, each in zip(ranks, works, strict=True)
    )
    update = max(
        rank.updated / memory + rank.update_flops / rate for rank, rate in zip(ranks, rates, strict=True)
    )
    step = max(works) * (1 + idle) + exchanged + update
    tokens = profile.step_tokens
    total = step * train.steps if train.steps else None
    hours = total and total / 3600 * cluster.nodes
    peak = device.peak(train.precision)
    return Estimate(
        idle,
        basis,
        step,
        tokens / step,
        peak and tokens / step * flops_per_token(profile) / (peak * profile.world_size),
        total and total / DAY,
        hours,
        hours and cluster.node_price and hours * cluster.node_price,
        _assumptions(profile, speeds, memory, rates[0]),
    )


def overlapped_tensor_share(profile: Profile, software: Software = OURS) -> float:
    """Share of the exchanges of tensor groups that may overlap with products.

    Ours are divided into chunks with the products (parallel/layers/overlap.py), of which one is exposed.
    """
    if software is not OURS:
        return float("tensor" in software.overlapped)
    train, parallel = profile.train, profile.parallel
    if not (parallel.sequence_parallel and device_of(profile).concurrent_collectives):
        return 0.0
    eight = train.precision == "fp8"
    row_bytes = profile.model.hidden_size * (1 if eight else DTYPES[train.precision].itemsize)
    rows = profile.micro_batch_rows * train.sequence_length // parallel.context
    axis = Axis("tensor", parallel.tensor, chunks=overlap_chunks(profile))
    share = 1 - 1 / count_chunks(rows, row_bytes, axis)
    return share * FP8_DIVIDED if eight else share


def is_too_short(profile: Profile) -> bool:
    """Whether model and batch are too small to estimate a step's time from FLOPs and bytes."""
    peak = device_of(profile).peak(profile.train.precision)
    flops = flops_per_token(profile) * profile.step_tokens
    return peak is not None and flops / (peak * profile.world_size) < MIN_SECONDS


def _assumptions(
    profile: Profile, speeds: Mapping[str, float], memory: float, rate: float
) -> tuple[str, ...]:
    peak = device_of(profile).peak(profile.train.precision)
    share = f", {rate / peak:.0%} of {peak / 1e12:g}" if peak else ""
    links = ", ".join(
        f"{axis} {speed / 1e9:.3g} GB/s ({level(profile, axis)})" for axis, speed in speeds.items() if speed
    )
    published = device_of(profile).bandwidth
    of_published = f", {memory / published:.0%} of {published / 1e9:,.0f}" if published else ""
    exchange = "do not overlap with compute"
    if profile.parallel.data_sharding == "fsdp" or device_of(profile).architecture:
        exchange = "overlap with compute, up to its duration"
    if device_of(profile).architecture:
        exchange += f", and slow it down by {CONTENTION:.0%} of theirs"
    overlapping = overlapped_tensor_share(profile) if "tensor" in speeds else 0.0
    hidden = [
        *(["pipeline messages"] if "pipeline" in speeds else []),
        *([f"{overlapping:.0%} of tensor exchanges"] if overlapping else []),
    ]
    overlaps = [
        *([f"{' and '.join(hidden)} overlap with compute"] if hidden else []),
        *([f"exchanges of gradients and weights {exchange}"] if speeds.keys() & {*DATA, *REPLICAS} else []),
    ]
    return (
        f"layers at {rate / 1e12:.3g} TFLOP/s per device{share}",
        f"optimizer at {memory / 1e9:,.0f} GB/s of memory per device{of_published}",
        *([f"communication per device: {links}"] if links else []),
        *(["; ".join(overlaps)] if overlaps else []),
        "evaluations, checkpoints and restarts are not included",
    )
