"""Bytes that one rank holds, by kind: parameters, gradients, optimizer states, activations and what is alive beside them.

The only byte count: the plan and the traced plan both go through it; planner.py says what each kind includes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from modeling.models.build import DTYPES, extra_warmup_forwards, partition_layers
from modeling.planning.stage_costs import LayerCosts
from parallel import device as devices
from parallel.optimizer.zero1 import IN_FLIGHT, fill_buckets
from parallel.pipeline.schedules import in_flight
from profiles.schema import Profile


def bucket_sizes(profile: Profile, stages: Sequence[nn.Module]) -> list[int]:
    """Elements of the ZeRO-1 buckets over a rank's stages, padding included, in the order that backward fills them."""
    settings = profile.train

    def decay(name: str, parameter: nn.Parameter) -> float:
        return settings.weight_decay * (settings.norm_weight_decay or parameter.dim() > 1)

    shards = profile.shard_degree
    parameters = [item for stage in stages for item in stage.named_parameters()]
    buckets = fill_buckets(parameters, decay)
    return [math.ceil(sum(p.numel() for _, p in members) / shards) * shards for *_, members in buckets]


def state_bytes(profile: Profile, buckets: Sequence[int]) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer states in buckets of these sizes."""
    settings = profile.train
    states = 8 if settings.precision == "float32" else 12  # float32 parameters are their own master weights
    return {
        "parameters": sum(buckets) * DTYPES[settings.precision].itemsize,
        "gradients": sum(buckets) * DTYPES[settings.gradient_dtype].itemsize,
        "optimizer": sum(buckets) // profile.shard_degree * states,
    }


def microbatches_in_flight(profile: Profile, rank: int) -> float:
    """Microbatches whose activations a pipeline rank holds at most; with k stages a rank, one stage's count 1/k."""
    parallel = profile.parallel
    stages = len(partition_layers(profile)[rank :: parallel.pipeline])
    return in_flight(
        parallel.schedule,
        parallel.pipeline,
        rank,
        profile.accumulation_steps,
        stages_per_rank=stages,
        extra_forwards=extra_warmup_forwards(profile),
    )


def eager_working_bytes(stages: Sequence[Sequence[LayerCosts]], microbatches: float) -> int:
    """Peak bytes of eager layers: activations saved by microbatches in flight, and the working memory of one layer.

    Args:
        stages: the layers of each of the rank's stages.
        microbatches: in flight.
    """
    saved = [sum(layer.saved for layer in stage) for stage in stages]
    return math.ceil(microbatches * sum(saved)) - max(saved) + max(map(_stage_peak, stages))


def _stage_peak(stage: Sequence[LayerCosts]) -> int:
    """Peak bytes while one microbatch goes through a stage and back."""
    before, peak = 0, 0
    for layer in stage:
        peak = max(peak, before + layer.forward_peak, before + layer.backward_peak)
        before += layer.saved
    return peak


def activation_bytes(
    profile: Profile, working: int, microbatches: float, hidden_bytes: int, buckets: Sequence[int]
) -> int:
    """Peak bytes besides parameters, gradients and optimizer states.

    Args:
        working: peak bytes of activations and of the layers' working memory.
        microbatches: in flight.
        hidden_bytes: of a microbatch's hidden states between stages.
        buckets: `bucket_sizes`.
    """
    exchanged = _exchanged_bytes(profile, buckets)
    if len(buckets) > IN_FLIGHT:  # the first buckets are exchanged while backward runs
        working += exchanged
    peak = max(working, exchanged)
    if profile.parallel.pipeline > 1:
        from parallel.pipeline.runtime import SENDS_IN_FLIGHT  # imports slowly; only pipelines need it

        # Stage inputs in flight, and messages: one being received and some being sent, each way.
        peak += math.ceil(microbatches + 2 + SENDS_IN_FLIGHT) * hidden_bytes
    # int64 token ids of the step's samples, and the tokens and targets sliced from them.
    samples = profile.accumulation_steps * profile.train.micro_batch_size
    return peak + 3 * 8 * profile.train.sequence_length // profile.parallel.context * samples


def _exchanged_bytes(profile: Profile, buckets: Sequence[int]) -> int:
    """Bytes of the gradient buckets being reduced over data × context at a time."""
    if profile.data_parallel * profile.parallel.context == 1:
        return 0
    device = devices.resolve(profile.cluster.device, profile.cluster.accelerator)
    width = DTYPES[profile.train.gradient_dtype].itemsize
    share = 1 / profile.shard_degree if device.supports_reduction else 1 + 1 / profile.shard_degree
    return math.ceil(sum(sorted(buckets)[-IN_FLIGHT:]) * width * share)
