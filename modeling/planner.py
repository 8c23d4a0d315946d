"""The preflight: what a run would take, from the profile alone, in seconds and without a device or a process group.

Each pipeline stage is built on the meta device as its fullest rank sees it and its bytes are counted from the layouts:

    parameters   in the type of training
    gradients    summed in `train.gradient_dtype`, whole on every rank
    optimizer    master weights and two moments in float32 over the ranks of data × context (float32 training: no master)
    activations  what a layer keeps for backward, times the microbatches in flight on that stage

Activations follow arXiv 2205.05198 (table 2) with memory-efficient attention and the fused loss. Time is model
FLOPs over the device's peak times an assumed utilization, and the pipeline's bubble on top; None where the
peak is not known.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import psutil
import torch

from modeling.program import DTYPES, MODELS, ahead, flops_per_token, stage_layers
from parallel import Mesh, parameter_count
from parallel import device as devices
from parallel.schedules import bubble, in_flight
from profiles.errors import ProfileError
from profiles.schema import Profile

UTILIZATION = 0.35  # of the peak, in matrix products; published runs of these models reach 0.22 to 0.41
RUNTIME_BYTES = 350 << 20  # interpreter, libraries, communication buffers
MARGIN = 0.95  # of the device's memory may be planned


@dataclass(frozen=True)
class Stage:
    """The fullest rank at one place of the pipeline; its layers as (first, end) and its bytes by kind."""

    layers: tuple[tuple[int, int], ...]
    parameters: int
    bytes: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


@dataclass(frozen=True)
class Plan:
    """See the module's text. `device_bytes` is one device's memory, a process's share of the host's on CPUs."""

    parameters: int
    mesh: dict[str, int]
    stages: tuple[Stage, ...]
    device_bytes: int
    fits: bool
    flops_per_token: float
    step_seconds: float | None
    tokens_per_second: float | None
    tokens: int
    kv_replication: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def plan(profile: Profile) -> Plan:
    """Plan a profile that `profiles.resolve.check` has passed."""
    parallel, settings = profile.parallel, profile.train
    stages = tuple(_stage(profile, index) for index in range(parallel.pipeline))
    device_bytes = _device_bytes(profile)
    fullest = max(stage.total for stage in stages) + RUNTIME_BYTES
    step_tokens = settings.global_batch_size * settings.sequence_length
    flops = flops_per_token(profile)
    peak = devices.resolve(profile.cluster.device, profile.cluster.accelerator).peak(settings.precision)
    seconds = None
    if peak:
        each = len(stages[0].layers)
        waiting = bubble(parallel.schedule, parallel.pipeline, profile.accumulation_steps, each)
        seconds = flops * step_tokens / (peak * profile.world_size * UTILIZATION) * (1 + waiting)
    return Plan(
        parameters=sum(stage.parameters for stage in stages),
        mesh={
            "pipeline": parallel.pipeline,
            "data": profile.data_parallel,
            "context": parallel.context,
            "tensor": parallel.tensor,
        },
        stages=stages,
        device_bytes=device_bytes,
        fits=fullest <= MARGIN * device_bytes,
        flops_per_token=flops,
        step_seconds=seconds,
        tokens_per_second=step_tokens / seconds if seconds else None,
        tokens=step_tokens * (settings.steps or 0),  # of epochs they are known once the data is
        kv_replication=profile.kv_replication,
    )


def require_fit(profile: Profile, planned: Plan) -> None:
    """Refuse a plan that does not fit.

    Raises:
        ProfileError: names the fullest stage, what it needs and what would help.
    """
    if planned.fits:
        return
    index, fullest = max(enumerate(planned.stages), key=lambda pair: pair[1].total)
    parts = ", ".join(f"{kind} {size / 2**30:.1f}" for kind, size in fullest.bytes.items())
    raise ProfileError(
        "parallel",
        f"tensor {profile.parallel.tensor} x pipeline {profile.parallel.pipeline}",
        f"stage {index} needs {fullest.total / 2**30:.1f} GiB a device ({parts}), "
        f"of which {planned.device_bytes / 2**30:.1f} GiB are there",
        [
            "a higher parallel.tensor or parallel.pipeline",
            "a smaller train.micro_batch_size",
            "train.recompute = full",
        ],
    )


def _stage(profile: Profile, index: int) -> Stage:
    """What the ranks at place `index` of the pipeline hold: one stage, or several where schedules interleave."""
    parallel, settings, model = profile.parallel, profile.train, profile.model
    degrees = (parallel.pipeline, profile.data_parallel, parallel.context, parallel.tensor)
    mesh = Mesh(*degrees, profile.kv_replication, rank=index * math.prod(degrees[1:]))
    dtype = DTYPES[settings.precision]
    own = stage_layers(profile)[index :: parallel.pipeline]
    built = [
        MODELS[model.architecture](
            model,
            mesh,
            layers,
            sequence_parallel=parallel.sequence_parallel,
            dtype=dtype,
            device=torch.device("meta"),
        )
        for layers in own
    ]
    local = sum(parameter.numel() for stage in built for parameter in stage.parameters())
    # A weight that the first and the last stage share is counted where the model begins.
    shared = model.tie_word_embeddings and parallel.pipeline > 1 and index == parallel.pipeline - 1
    count = sum(parameter_count(stage) for stage in built) - (
        model.vocab_size * model.hidden_size if shared else 0
    )
    shards = mesh.zero.size if parallel.zero1 else 1
    states = 8 if dtype == torch.float32 else 12
    return Stage(
        layers=tuple((layers.start, layers.stop) for layers in own),
        parameters=count,
        bytes={
            "parameters": local * dtype.itemsize,
            "gradients": local * DTYPES[settings.gradient_dtype].itemsize,
            "optimizer": math.ceil(local / shards) * states,
            "activations": _activations(profile, own, index),
        },
    )


def _activations(profile: Profile, own: list[range], index: int) -> int:
    """Bytes that are alive when most are: kept inputs of every layer in flight, one layer's work, and the loss's chunk."""
    parallel, settings, model = profile.parallel, profile.train, profile.model
    t, itemsize = parallel.tensor, DTYPES[settings.precision].itemsize
    tokens = settings.micro_batch_size * settings.sequence_length // parallel.context
    h, f, d = model.hidden_size, model.intermediate_size, model.head_dim
    heads = model.num_attention_heads + 2 * max(model.num_key_value_heads, t)
    outside = tokens * h // (t if parallel.sequence_parallel else 1)
    # Inputs of both norms and of both column layers; q, k, v (before and after rotation), attention's output and its
    # log-sum-exp; gate, up, their product.
    inside = tokens * (2 * heads * d + model.num_attention_heads * d + 4 * f) // t
    layer = (4 * outside + inside) * itemsize + 4 * tokens * model.num_attention_heads // t
    # Its input and what its projections give.
    products = (3 * outside + tokens * (heads * d + 2 * f) // t) * itemsize
    kept = {"none": layer, "selective": products, "full": outside * itemsize}
    microbatches = in_flight(
        parallel.schedule,
        parallel.pipeline,
        index,
        profile.accumulation_steps,
        each=len(own),
        ahead=ahead(profile),
    )
    again = sum(min(len(layers), settings.recompute_layers or len(layers)) for layers in own)
    rest = sum(map(len, own)) - again
    alive = math.ceil(microbatches * (again * kept[settings.recompute] + rest * layer)) + layer
    if (
        index == parallel.pipeline - 1
    ):  # the fused loss: gathered input, its gradient, a chunk of float32 logits twice
        alive += 2 * tokens * h * itemsize + 2 * min(32 << 20, tokens * model.vocab_size // t * 4)
    return alive


def _device_bytes(profile: Profile) -> int:
    memory = devices.resolve(profile.cluster.device, profile.cluster.accelerator).memory_bytes
    return memory or psutil.virtual_memory().total // profile.cluster.devices_per_node
