"""Memory traffic of the optimizer: bytes that a rank accumulates and updates in a step.

Of one device at bf16 with float32 gradients and one microbatch, 48 bytes per parameter: 6 to accumulate, 8 for the norms of
gradients and weights, 28 for AdamW and 6 for the bf16 copy. What other ranks update counts on them: with d shards, all but the
accumulation is divided by d. Each further microbatch adds 10 bytes with ZeRO-1, whose gradients are sums in place; with FSDP 6,
and 12/d more for the sum of shards and 6/d more for each gather. QK-clip adds 8 per parameter of buckets with queries and keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from modeling.models.build import DTYPES
from modeling.planning.memory import PlannedBucket, weight_passes
from profiles.schema import Profile

WIDE = 4  # bytes of a float32


class OptimizerTraffic(NamedTuple):
    """Bytes that a rank's optimizer reads and writes in a step, and its matrix products."""

    accumulated: int  # during the microbatches, between forward and backward passes
    updated: int  # after the last one
    flops: float  # of matrix products, after the last one


def optimizer_traffic(profile: Profile, buckets: Sequence[PlannedBucket]) -> OptimizerTraffic:
    """Memory traffic of a step; `buckets`: result of `plan_buckets`."""
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
        updated += shard * (
            gradient + WIDE + gradient + bucket.rule.traffic
        )  # norms of gradients and weights
        if bucket.scaled:
            updated += shard * 2 * WIDE
        multiply_adds += bucket.multiply_adds // (bucket.shards * profile.parallel.tensor)
    return OptimizerTraffic(accumulated, updated, 2.0 * multiply_adds)
