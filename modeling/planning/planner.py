"""The preflight: what a run would take, from the profile alone, in seconds and without a device or a process group.

Each pipeline stage is built on the meta device as its fullest rank sees it. Bytes of one rank:

    parameters   in the type of training     } of ZeRO-1's buckets, their padding included
    gradients    in `train.gradient_dtype`   }
    optimizer    master weights and two moments in float32 over the ranks of data × context (float32 training: no master)
    activations  what eager layers keep, times the microbatches in flight on that stage, with the most that one layer's work,
                 the loss, messages and exchanges of gradients take on top; compiled graphs keep no more

What layers keep, send and multiply is counted from the layers themselves (meter.py); what that takes in time is in estimate.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psutil
from torch import nn

from modeling.models.build import extra_warmup_forwards, partition_layers
from modeling.models.flops import flops_per_token
from modeling.planning.memory import activation_bytes, bucket_sizes, state_bytes
from modeling.planning.stage_costs import Counted, Piece, Pieces
from modeling.planning.step_time import estimate
from parallel import device as devices
from parallel import parameter_count
from parallel.activation_checkpointing import MODES
from parallel.constraints import valid_tensor_degrees
from parallel.pipeline.schedules import in_flight
from profiles.check import ACCELERATORS, changed, passes
from profiles.errors import ProfileError
from profiles.schema import Profile

HOST_BYTES = 350 << 20  # interpreter and libraries
COMPILED_BYTES = 100 << 20  # and what loading compiled graphs brings along
MARGIN = 0.95  # of the device's memory may be planned


@dataclass(frozen=True)
class Stage:
    """The fullest rank at one place of the pipeline.

    Attributes:
        layers: of each of its stages, (first, end).
        parameters: of the model, each once over the tensor ranks.
        bytes: by kind.
        flops: of one rank in a step, recomputation and padding included.
        sent: bytes that one rank sends in a step, by dimension.
    """

    layers: tuple[tuple[int, int], ...]
    parameters: int
    bytes: dict[str, int]
    flops: float
    sent: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


@dataclass(frozen=True)
class Plan:
    """What a run would take.

    Attributes:
        parameters: of the model.
        mesh: size by axis.
        stages: of the pipeline's ranks, in order.
        host_bytes: what a process takes of the device's memory besides tensors, where the device is the host.
        device_bytes: one device's memory; on CPUs a process's share of the host's.
        fits: whether the fullest rank leaves 5 % of it free, what its process takes counted in.
        flops_per_token: of the model in training, 6 a multiply-add of the forward pass.
        tokens: of the whole run, None where the data decides.
        sent: bytes that the busiest rank sends in a step, by dimension.
        kv_replication: tensor ranks that hold the same KV head.
        bubble: share of the working time that a rank waits for others of its pipeline.
        step_seconds, tokens_per_second, mfu, days, node_hours, price: None where the device's speed is not known; the last
            three also where the data decides how long the run is, the price where the profile has none.
        assumptions: what the times rest on, a sentence each.
    """

    parameters: int
    mesh: dict[str, int]
    stages: tuple[Stage, ...]
    host_bytes: int
    device_bytes: int
    fits: bool
    flops_per_token: float
    tokens: int | None
    sent: dict[str, int]
    kv_replication: int
    bubble: float
    step_seconds: float | None
    tokens_per_second: float | None
    mfu: float | None
    days: float | None
    node_hours: float | None
    price: float | None
    assumptions: tuple[str, ...]

    @property
    def fullest(self) -> int:
        """Number of the stage that needs most."""
        return max(range(len(self.stages)), key=lambda number: self.stages[number].total)

    @property
    def needs(self) -> int:
        """Bytes of a device's memory that the fullest rank takes."""
        return self.stages[self.fullest].total + self.host_bytes

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def host_bytes(profile: Profile) -> int:
    """What a process takes of the device's memory besides tensors, which is so where the device is the host."""
    if profile.cluster.device != "cpu":
        return 0
    return HOST_BYTES + (COMPILED_BYTES if profile.compile.enabled else 0)


def plan(profile: Profile, counted: Counted | None = None) -> Plan:
    """Plan a profile that `profiles.resolve.check` has passed.

    Args:
        counted: what was counted for other plans of the same model, to count nothing twice.

    Raises:
        ProfileError: the device's memory is known neither here nor to the profile.
    """
    parallel, settings = profile.parallel, profile.train
    stages = _stages(profile, Pieces(profile, counted))
    own, there = host_bytes(profile), device_bytes(profile)
    step_tokens = settings.global_batch_size * settings.sequence_length
    times = estimate(profile, stages, len(stages[0].layers))
    return Plan(
        parameters=sum(stage.parameters for stage in stages),
        mesh={
            "pipeline": parallel.pipeline,
            "data": profile.data_parallel,
            "context": parallel.context,
            "tensor": parallel.tensor,
        },
        stages=stages,
        host_bytes=own,
        device_bytes=there,
        fits=max(stage.total for stage in stages) + own <= MARGIN * there,
        flops_per_token=flops_per_token(profile),
        tokens=step_tokens * settings.steps if settings.steps else None,
        sent={axis: max(stage.sent[axis] for stage in stages) for axis in stages[0].sent},
        kv_replication=profile.kv_replication,
        **asdict(times),
    )


def require_fit(profile: Profile, planned: Plan) -> None:
    """Refuse a plan that does not fit.

    Raises:
        ProfileError: names the fullest stage, what it needs, and single changes that make the run fit.
    """
    if planned.fits:
        return
    held = planned.stages[planned.fullest].bytes | (
        {"process": planned.host_bytes} if planned.host_bytes else {}
    )
    parts = ", ".join(f"{kind} {size / 2**30:.1f}" for kind, size in held.items())
    reason = (
        f"stage {planned.fullest} needs {planned.needs / 2**30:.1f} GiB a device ({parts}), "
        f"of which {planned.device_bytes / 2**30:.1f} GiB are there and 5 % stay free"
    )
    choices = lighter(profile, lambda other: other.fits and other.needs < planned.needs)
    if not choices:
        reason += "; no single change is enough, trainshed plan --search looks for several"
    degrees = f"tensor {profile.parallel.tensor} x pipeline {profile.parallel.pipeline}"
    raise ProfileError("parallel", degrees, reason, list(choices))


def lighter(profile: Profile, enough: Callable[[Plan], bool]) -> dict[str, Plan]:
    """Single changes that take less memory, `key=value` each: of every key the smallest whose plan is enough, and that plan."""
    counted: Counted = {}
    found: dict[str, Plan] = {}
    for key, values in _savings(profile):
        for value in values:
            other = changed(profile, key, value)
            if passes(other) and enough(planned := plan(other, counted)):
                found[f"{key}={value}"] = planned
                break
    return found


def _savings(profile: Profile) -> Iterator[tuple[str, Sequence[Any]]]:
    """Keys, and values of them that take less memory than the profile's own, the smallest change first."""
    train, parallel, model = profile.train, profile.parallel, profile.model
    size = train.micro_batch_size
    yield "train.micro_batch_size", [n for n in range(size - 1, 0, -1) if size % n == 0]
    yield "train.recompute", MODES[MODES.index(train.recompute) + 1 :]
    degrees = valid_tensor_degrees(model.num_attention_heads, model.num_key_value_heads)
    node = profile.cluster.devices_per_node
    yield "parallel.tensor", [t for t in degrees if parallel.tensor < t <= node]
    yield (
        "parallel.pipeline",
        range(parallel.pipeline + 1, min(model.num_hidden_layers, profile.world_size) + 1),
    )


def require_devices(profile: Profile) -> None:
    """Refuse a run that starts more processes on this machine than it has devices of that kind.

    Raises:
        ProfileError: with how many there are, or which software is missing.
    """
    cluster = profile.cluster
    if cluster.launcher != "local" or cluster.device == "cpu":
        return
    try:
        there = devices.resolve(cluster.device, cluster.accelerator).available()
    except RuntimeError as error:
        raise ProfileError("cluster.device", cluster.device, str(error), ["cpu"]) from None
    if there == 0:
        raise ProfileError("cluster.device", cluster.device, "this machine has none", ["cpu"])
    if cluster.devices_per_node > there:
        reason = f"this machine has {there} {cluster.device} devices"
        raise ProfileError("cluster.devices_per_node", cluster.devices_per_node, reason, [there])


def _stages(profile: Profile, pieces: Pieces) -> tuple[Stage, ...]:
    """What the ranks at each place of the pipeline hold: one stage, or several where schedules interleave."""
    parallel, count = profile.parallel, profile.accumulation_steps
    ranks, layers, forwards = parallel.pipeline, partition_layers(profile), extra_warmup_forwards(profile)

    def one(place: int) -> Stage:
        own = layers[place::ranks]
        built = [pieces.stage(held) for held in own]
        parts = [pieces.of(held) for held in own]
        buckets = bucket_sizes(profile, built)
        alive = in_flight(
            parallel.schedule, ranks, place, count, stages_per_rank=len(own), extra_forwards=forwards
        )
        memory = state_bytes(profile, buckets)
        memory["activations"] = activation_bytes(profile, pieces, parts, alive, buckets)
        return Stage(
            layers=tuple((held.start, held.stop) for held in own),
            parameters=_parameters(profile, built, place),
            bytes=memory,
            flops=count * sum(piece.flops for stage in parts for piece in stage),
            sent=_sent(profile, pieces, parts, memory),
        )

    return tuple(one(place) for place in range(ranks))


def _parameters(profile: Profile, built: Sequence[nn.Module], place: int) -> int:
    model, ranks = profile.model, profile.parallel.pipeline
    # A weight that the first and the last stage share is counted where the model begins.
    shared = model.tie_word_embeddings and ranks > 1 and place == ranks - 1
    return sum(map(parameter_count, built)) - (model.vocab_size * model.hidden_size if shared else 0)


def _sent(
    profile: Profile, pieces: Pieces, parts: Sequence[Sequence[Piece]], memory: dict[str, int]
) -> dict[str, int]:
    """Bytes that one rank sends in a step, by dimension."""
    count, parallel = profile.accumulation_steps, profile.parallel
    counted: Counter[str] = Counter()
    for piece in (piece for stage in parts for piece in stage):
        counted.update(piece.sent)
    zero = profile.data_parallel * parallel.context
    # Gradients are reduced and scattered, weights gathered; without ZeRO-1 gradients are reduced, which takes both ways.
    exchanged = memory["gradients"] + memory["parameters" if parallel.zero1 else "gradients"]
    messages = 2 * len(parts) * count * pieces.hidden_bytes if parallel.pipeline > 1 else 0
    return {
        "tensor": count * (counted["tensor"] + counted["kv_replica"]),
        "context": count * counted["context"],
        "pipeline": messages,
        "data": exchanged * (zero - 1) // zero,
    }


def device_bytes(profile: Profile) -> int:
    """One device's memory; on CPUs a process's share of the host's.

    Raises:
        ProfileError: it is known neither here nor to the profile.
    """
    cluster = profile.cluster
    memory = devices.resolve(cluster.device, cluster.accelerator).memory_bytes
    if memory is None and cluster.device != "cpu":
        reason = f"is missing: this machine has no {cluster.device} device whose memory could be asked for"
        raise ProfileError("cluster.accelerator", None, reason, ACCELERATORS[cluster.device])
    return memory or psutil.virtual_memory().total // cluster.devices_per_node
