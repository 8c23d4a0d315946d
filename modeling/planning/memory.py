"""Bytes that one rank holds, by kind; see planner.py for what counts as what."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from modeling.models.build import DTYPES
from modeling.planning.stage_costs import Piece, Pieces
from parallel import device as devices
from parallel.optimizer.zero1 import IN_FLIGHT, fill_buckets
from profiles.schema import Profile


def bucket_sizes(profile: Profile, stages: Sequence[nn.Module]) -> list[int]:
    """Elements of ZeRO-1's buckets over a rank's stages, padding included, in the order that backward fills them."""
    settings = profile.train

    def decay(name: str, parameter: nn.Parameter) -> float:
        return settings.weight_decay * (settings.norm_weight_decay or parameter.dim() > 1)

    shards = shards_of(profile)
    rows = fill_buckets([each for stage in stages for each in stage.named_parameters()], decay)
    return [math.ceil(sum(p.numel() for _, p in row) / shards) * shards for *_, row in rows]


def shards_of(profile: Profile) -> int:
    """Ranks that an optimizer state is spread over."""
    return profile.data_parallel * profile.parallel.context if profile.parallel.zero1 else 1


def state_bytes(profile: Profile, buckets: Sequence[int]) -> dict[str, int]:
    """Of parameters, gradients and optimizer states in buckets of these sizes."""
    settings = profile.train
    states = 8 if settings.precision == "float32" else 12  # in float32 the master weights are the parameters
    return {
        "parameters": sum(buckets) * DTYPES[settings.precision].itemsize,
        "gradients": sum(buckets) * DTYPES[settings.gradient_dtype].itemsize,
        "optimizer": sum(buckets) // shards_of(profile) * states,
    }


def activation_bytes(
    profile: Profile,
    pieces: Pieces,
    stages: Sequence[Sequence[Piece]],
    in_flight: float,
    buckets: Sequence[int],
) -> int:
    """Of all else when it is most: kept by microbatches in flight, at work, read, exchanged.

    Args:
        stages: pieces of each of the rank's stages.
        in_flight: microbatches, one of a single stage among k counting 1/k.
        buckets: `bucket_sizes`.
    """
    kept = [sum(piece.kept for piece in stage) for stage in stages]
    others = math.ceil(in_flight * sum(kept)) - max(kept)
    most = others + max(_most(stage) for stage in stages)
    exchanged = _exchanged(profile, buckets)
    if len(buckets) > IN_FLIGHT:  # while backward goes on
        most += exchanged
    alive = max(most, exchanged)
    if profile.parallel.pipeline > 1:
        from parallel.pipeline.runtime import SENDS_IN_FLIGHT  # half a second that only pipelines need

        # Inputs of what is in flight, and messages under way: one received and some sent, each way.
        alive += math.ceil(in_flight + 2 + SENDS_IN_FLIGHT) * pieces.hidden_bytes
    # Token ids: samples of the step, and tokens and targets cut out of them.
    return alive + 3 * 8 * profile.train.sequence_length // profile.parallel.context * (
        profile.accumulation_steps * profile.train.micro_batch_size
    )


def _most(stage: Sequence[Piece]) -> int:
    """While one microbatch goes through a stage and back."""
    before, most = 0, 0
    for piece in stage:
        most = max(most, before + piece.forward, before + piece.backward)
        before += piece.kept
    return most


def _exchanged(profile: Profile, buckets: Sequence[int]) -> int:
    """Buckets whose gradients are under way over data × context."""
    if profile.data_parallel * profile.parallel.context == 1:
        return 0
    device = devices.resolve(profile.cluster.device, profile.cluster.accelerator)
    width = DTYPES[profile.train.gradient_dtype].itemsize
    share = 1 / shards_of(profile) if device.reduces else 1 + 1 / shards_of(profile)
    return math.ceil(sum(sorted(buckets)[-IN_FLIGHT:]) * width * share)
