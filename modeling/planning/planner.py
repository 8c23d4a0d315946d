"""The plan: a run's memory, communication, step time and cost, from its profile alone.

Builds each pipeline stage on the meta device as on its fullest rank; takes seconds. Bytes of one rank:

    parameters   in the training dtype       } in ZeRO-1 buckets, padding included
    gradients    in `train.gradient_dtype`   }
    optimizer    master weights and moments in float32, sharded over data × context (float32 training: no master)
    activations  saved by eager layers, times the microbatches in flight, plus the maximum of one layer's working memory, the
                 loss, messages and gradient exchange; compiled graphs save no more

Activations, communication and FLOPs are measured on the layers themselves (stage_costs.py); step_time.py computes seconds from
them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from modeling.cores import usable_memory
from modeling.models.build import DTYPES, device_of, partition_layers
from modeling.models.flops import flops_per_token, idle_updates
from modeling.planning import memory
from modeling.planning.efficiency import OURS, Software
from modeling.planning.links import level
from modeling.planning.memory import PlannedBucket, weight_passes
from modeling.planning.stage_costs import CostCache, LayerCosts, StageCosts, counts_choices
from modeling.planning.step_time import Estimate, StagePlan, beside_experts, estimate, layer_speed
from parallel import parameter_count
from parallel.constraints import valid_expert_degrees
from profiles.check import passes, with_value
from profiles.errors import ProfileError, counted
from profiles.recompute import MODES, modes_of
from profiles.rules.cluster import ACCELERATORS
from profiles.schema import Profile

HOST_BYTES = 350 << 20  # of a process's interpreter and libraries
COMPILED_BYTES = 100 << 20  # of the compiled graphs that a process loads
# Minimum tokens per context rank of a proposed degree: smaller parts of a sequence are rarely worth their communication, and
# large degrees take seconds to measure.
CONTEXT_TOKENS = 8192
WIDE = 4  # bytes of a float32


@dataclass(frozen=True, kw_only=True)
class Plan(Estimate):
    """Memory, communication, step time and cost of a run, computed without devices."""

    parameters: int  # of the model
    active_parameters: int  # those that one token uses: fewer only in a model with experts
    mesh: dict[str, int]  # size of each mesh axis
    stages: tuple[StagePlan, ...]  # by pipeline rank
    host_bytes: int  # memory of a process besides tensors, on devices that share the host's memory; else 0
    device_bytes: int  # memory of one device; on CPUs, a process's share of the host's memory
    reserve: float  # share of that memory that a plan leaves free
    fits: bool  # whether the fullest rank, `host_bytes` included, leaves the reserve free
    flops_per_token: float  # of training, analytic (modeling/models/flops.py)
    tokens: int | None  # of the run; None if the data determines it
    communication: dict[str, int]  # bytes that the busiest rank sends in a step, by mesh axis
    # links between the ranks of each axis that communicates: "chip", "node" or "network"
    levels: dict[str, str]
    kv_replication: int  # tensor ranks that hold the same KV head

    @property
    def fullest(self) -> int:
        """The pipeline rank that needs the most memory."""
        return max(range(len(self.stages)), key=lambda rank: self.stages[rank].total)

    @property
    def needs(self) -> int:
        """Bytes of a device's memory that the fullest rank needs."""
        return self.stages[self.fullest].total + self.host_bytes

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "needs_bytes": self.needs}


def host_bytes(profile: Profile) -> int:
    """Memory of a process besides tensors, on devices that share the host's memory; else 0."""
    if profile.cluster.device != "cpu":
        return 0
    return HOST_BYTES + (COMPILED_BYTES if profile.compile.possible else 0)


def fits(stages: Sequence[StagePlan], host: int, device: int, reserve: float) -> bool:
    """Whether the fullest stage plus `host` bytes of its process leaves the reserve of `device` free."""
    return max(stage.total for stage in stages) + host <= (1 - reserve) * device


def plan(profile: Profile, cache: CostCache | None = None, software: Software = OURS) -> Plan:
    """Plan a profile that `profiles.resolve.check` accepts.

    Args:
        cache: measurements of layers in other plans, to reuse and extend.
        software: whose kernels and exchanges to assume where nothing is measured.

    Raises:
        ProfileError: the device's memory is known neither to this machine nor to the profile.
    """
    parallel, settings = profile.parallel, profile.train
    stages = _stages(profile, StageCosts(profile, cache), software)
    host, device, reserve = host_bytes(profile), device_bytes(profile), device_of(profile).reserve
    communication = {
        axis: max(stage.communication[axis] for stage in stages) for axis in stages[0].communication
    }
    step_tokens = profile.step_tokens
    parameters = sum(stage.parameters for stage in stages)
    model = profile.model
    return Plan(
        parameters=parameters,
        active_parameters=parameters - (model.parameters - model.active_parameters) - idle_updates(profile),
        mesh={
            "pipeline": parallel.pipeline,
            "data": profile.data_parallel,
            "context": parallel.context,
            "tensor": parallel.tensor,
            **({"expert": parallel.expert} if parallel.expert > 1 else {}),
        },
        stages=stages,
        host_bytes=host,
        device_bytes=device,
        reserve=reserve,
        fits=fits(stages, host, device, reserve),
        flops_per_token=flops_per_token(profile),
        tokens=step_tokens * settings.steps if settings.steps else None,
        communication=communication,
        levels={axis: level(profile, axis) for axis, size in communication.items() if size},
        kv_replication=profile.kv_replication,
        **asdict(estimate(profile, stages, len(stages[0].layers), software)),
    )


def require_fit(profile: Profile, planned: Plan) -> None:
    """Reject a plan that does not fit. Raises ProfileError with single changes that make it fit."""
    if planned.fits:
        return
    process = {"process": planned.host_bytes} if planned.host_bytes else {}
    kinds = planned.stages[planned.fullest].bytes | process
    parts = ", ".join(f"{kind} {size / 2**30:.1f}" for kind, size in kinds.items())
    reason = (
        f"stage {planned.fullest} needs {planned.needs / 2**30:.1f} GiB per device ({parts}), "
        f"which has {planned.device_bytes / 2**30:.1f} GiB and must keep {planned.reserve:.0%} free"
    )
    choices = lighter(profile, lambda other: other.fits and other.needs < planned.needs)
    if not choices:
        reason += "; no single change is enough, search for combinations with trainshed plan --search"
    degrees = f"tensor {profile.parallel.tensor} x pipeline {profile.parallel.pipeline}"
    raise ProfileError("parallel", degrees, reason, list(choices))


def lighter(profile: Profile, accept: Callable[[Plan], bool]) -> dict[str, Plan]:
    """Single `key=value` changes that save memory, with plans: for each key the smallest accepted one."""
    cache: CostCache = {}
    choices: dict[str, Plan] = {}
    for key, values in _savings(profile):
        for value in values:
            other = with_value(profile, key, value)
            if passes(other) and accept(planned := plan(other, cache)):
                choices[f"{key}={value}"] = planned
                break
    return choices


def _savings(profile: Profile) -> Iterator[tuple[str, Sequence[Any]]]:
    """Keys and their values that need less memory than the profile's, smallest change first."""
    train, parallel, model = profile.train, profile.parallel, profile.model
    size = train.micro_batch_size
    yield "train.micro_batch_size", [n for n in range(size - 1, 0, -1) if size % n == 0]
    yield "parallel.data_sharding", ["fsdp"] if parallel.data_sharding != "fsdp" else []
    lightest = min(map(MODES.index, modes_of(train.recompute)))
    yield "train.recompute", MODES[lightest + 1 :]
    degrees = model.tensor_degrees
    node = profile.cluster.devices_per_node
    yield "parallel.tensor", [t for t in degrees if parallel.tensor < t <= node]
    if model.num_experts is not None:
        degrees = valid_expert_degrees(model.num_experts, profile.weight_replicas)
        yield "parallel.expert", [n for n in degrees if n > parallel.expert]
    longest = train.sequence_length // CONTEXT_TOKENS
    doublings = [parallel.context << i for i in range(1, longest.bit_length())]
    yield "parallel.context", [n for n in doublings if n <= longest and profile.weight_replicas % n == 0]
    deepest = min(model.num_hidden_layers, profile.world_size)
    yield "parallel.pipeline", range(parallel.pipeline + 1, deepest + 1)


def require_devices(profile: Profile) -> None:
    """Reject a local run that starts more processes than this machine has devices.

    Raises:
        ProfileError: there are too few devices, or their software is missing.
    """
    cluster = profile.cluster
    if cluster.launcher != "local" or cluster.device == "cpu":
        return
    try:
        available = device_of(profile).available()
    except RuntimeError as error:
        raise ProfileError("cluster.device", cluster.device, str(error), ["cpu"]) from None
    if available == 0:
        raise ProfileError("cluster.device", cluster.device, "this machine has none", ["cpu"])
    if cluster.devices_per_node > available:
        reason = f"this machine has {counted(available, f'{cluster.device} device')}"
        raise ProfileError("cluster.devices_per_node", cluster.devices_per_node, reason, [available])


def _stages(profile: Profile, costs: StageCosts, software: Software) -> tuple[StagePlan, ...]:
    """The plan of each pipeline rank, which has several stages with interleaving."""
    ranks, partition = profile.parallel.pipeline, partition_layers(profile)
    in_flight = memory.microbatches_in_flight(profile)
    plan_buckets = memory.bucket_planner(profile, costs.cache)

    def plan_rank(rank: int) -> StagePlan:
        layers = partition[rank::ranks]
        modules = [costs.module(stage) for stage in layers]
        stages = [costs.layers(stage) for stage in layers]
        buckets, microbatches = plan_buckets(*modules), in_flight[rank]
        working = memory.eager_working_bytes(stages, microbatches) + memory.choice_bytes(profile, layers)
        held = memory.rank_bytes(profile, working, microbatches, costs.hidden_bytes, buckets)
        accumulated, updated, update_flops = optimizer_traffic(profile, buckets)
        every = [layer for stage in stages for layer in stage]
        distinct = {id(layer): layer for layer in every}  # equal layers are one object
        beside = {key: beside_experts(profile, layer, software) for key, layer in distinct.items()}
        rate, attention = layer_speed(profile, every, software)
        return StagePlan(
            layers=tuple((stage.start, stage.stop) for stage in layers),
            parameters=_parameters(profile, modules, rank),
            bytes=held,
            flops=profile.accumulation_steps * sum(layer.flops for layer in every),
            rate=rate,
            attention=attention,
            communication=_communication_bytes(profile, costs, stages, buckets),
            accumulated=accumulated,
            updated=updated,
            update_flops=update_flops,
            beside_experts=profile.accumulation_steps * sum(beside[id(layer)] for layer in every),
        )

    return tuple(plan_rank(rank) for rank in range(ranks))


def _parameters(profile: Profile, modules: Sequence[nn.Module], rank: int) -> int:
    model, ranks = profile.model, profile.parallel.pipeline
    # A shared embedding is on the first and the last rank; the first counts it.
    shared = model.shares_embedding and ranks > 1 and rank == ranks - 1
    return sum(map(parameter_count, modules)) - (model.vocab_size * model.hidden_size if shared else 0)


def _communication_bytes(
    profile: Profile,
    costs: StageCosts,
    stages: Sequence[Sequence[LayerCosts]],
    buckets: Sequence[memory.PlannedBucket],
) -> dict[str, int]:
    """Bytes that one rank sends in a step, by mesh axis."""
    count, parallel = profile.accumulation_steps, profile.parallel
    layers: Counter[str] = Counter()
    for layer in (layer for stage in stages for layer in stage):
        layers.update(layer.communication)
    # forward and backward, and the passes without gradients
    passes = 2 + profile.scores_pairs_in_step + counts_choices(profile)
    messages = passes * len(stages) * count * costs.hidden_bytes if parallel.pipeline > 1 else 0
    weights = memory.communication_bytes(profile, buckets)
    return {
        "tensor": count * (layers["tensor"] + layers["kv_replica"]) + weights.pop("tensor", 0),
        "context": count * layers["context"],
        "expert": count * layers["expert"],
        "pipeline": messages,
        **weights,
    }


def optimizer_traffic(profile: Profile, buckets: Sequence[PlannedBucket]) -> tuple[int, int, float]:
    """Bytes that a rank's optimizer accesses during and after a step's microbatches; FLOPs of its update.

    Of one device at bf16 with float32 gradients and one microbatch, 48 bytes per parameter: 6 to accumulate, 8 for the norms of
    gradients and weights, 28 for AdamW and 6 for the bf16 copy. What other ranks update counts on them: with d shards, all but
    the accumulation is divided by d. Each further microbatch adds 10 bytes with ZeRO-1, whose gradients are sums in place; with
    FSDP 6, and 12/d more for the sum of shards and 6/d more for each gather. QK-clip adds 8 per parameter of buckets with queries
    and keys.
    """
    train, keeps, microbatches = profile.train, profile.parallel.keep_gathered, profile.accumulation_steps
    weight, gradient = DTYPES[train.precision].itemsize, DTYPES[train.gradient_dtype].itemsize
    accumulated = updated = multiply_adds = 0
    for bucket in buckets:
        if bucket.rule is None:
            continue
        shard = bucket.size // bucket.shards
        # The first gradient of a sum is written, later ones are added.
        later = microbatches - 1 if bucket.resident or keeps else 0
        accumulated += bucket.size * (microbatches * (weight + gradient) + later * gradient)
        if bucket.resident:
            if bucket.shards * bucket.replicas > 1:
                updated += shard * 2 * gradient  # the sum over ranks is copied into its place
            if train.precision != "float32":  # else weights are their own master weights
                updated += shard * (WIDE + weight)
        else:
            passes = weight_passes(profile) * microbatches if bucket.block else 1
            sums, gathers = (1, 1) if keeps else (microbatches, passes)
            accumulated += shard * (sums * 3 - 1) * gradient
            accumulated += shard * gathers * (WIDE + weight)
        # Besides the rule, norms of gradients and weights.
        updated += shard * (gradient + WIDE + gradient + bucket.rule.traffic)
        if bucket.scaled:
            updated += shard * 2 * WIDE
        multiply_adds += bucket.multiply_adds // (bucket.shards * profile.parallel.tensor)
    return accumulated, updated, 2.0 * multiply_adds


def device_bytes(profile: Profile) -> int:
    """Memory of one device; on CPUs, a process's share of the host's memory.

    Raises:
        ProfileError: it is known neither to this machine nor to the profile.
    """
    cluster = profile.cluster
    size = device_of(profile).memory_bytes
    if size is None and cluster.device != "cpu":
        reason = f"is missing: this machine has no {cluster.device} device to read the memory size from"
        raise ProfileError("cluster.accelerator", None, reason, ACCELERATORS[cluster.device])
    return size or usable_memory() // cluster.devices_per_node
