"""Valid degrees, microbatch counts, pipeline cuts, checkpointing modes and sizes in FP8.

Shared with profile validation, so it does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

RECOMPUTE_MODES = ("none", "selective", "full")
"""Modes of activation checkpointing, by increasing recomputation."""
FP8_MULTIPLE = {"tensorwise": 16, "rowwise": 16, "mxfp8": 32}
"""By FP8 recipe, the number of which each dim of a product's factors is a multiple."""


def valid_tensor_degrees(heads: int, kv_heads: int) -> list[int]:
    """Ascending tensor degrees that divide the query heads, and divide or are multiples of the KV heads."""
    return [t for t in range(1, heads + 1) if heads % t == 0 and (kv_heads % t == 0 or t % kv_heads == 0)]


def kv_replicas(kv_heads: int, tensor: int) -> int:
    """Number of tensor ranks that hold the same KV head: m = max(1, t/k)."""
    return max(1, tensor // kv_heads)


def valid_expert_degrees(experts: int, weight_replicas: int) -> list[int]:
    """Ascending expert degrees that divide both the experts of a layer and data × context."""
    common = math.gcd(experts, weight_replicas)
    return [n for n in range(1, common + 1) if common % n == 0]


def expert_shard_degree(shard_degree: int, expert: int, weight_replicas: int) -> int:
    """Number of ranks that shard the same experts' states, on no more nodes than other parameters' states.

    Args:
        shard_degree: number of ranks over which other parameters' states are sharded.
        expert: degree of the expert axis.
        weight_replicas: data × context.
    """
    return math.gcd(max(1, shard_degree // expert), weight_replicas // expert)


def minimum_stages(schedule: str, ranks: int) -> int:
    """Minimum number of pipeline stages, each with a layer; also their number without explicit cuts."""
    return 2 * ranks if schedule == "interleaved" and ranks > 1 else ranks


def supports_microbatches(schedule: str, ranks: int, microbatches: int) -> bool:
    """Whether a pipeline schedule can run this number of microbatches per step."""
    if ranks == 1:
        return True
    if schedule == "1f1b":
        return microbatches >= ranks
    # The other schedules run in equal rounds of about one microbatch per rank.
    return microbatches % max(1, microbatches // ranks) == 0


def invalid_cuts(cuts: Sequence[int], layers: int, ranks: int, schedule: str) -> str | None:
    """The reason why these pipeline cuts are invalid; None if they are valid.

    Args:
        cuts: first layer of the second and each later stage.
        layers: of the model.
        ranks: of the pipeline axis.
        schedule: one of `schedules.SCHEDULES`.
    """
    stages = len(cuts) + 1
    interleaved = minimum_stages(schedule, ranks) > ranks
    if stages % ranks or (stages > ranks) != interleaved:
        expected = f"{2 * ranks - 1}, {3 * ranks - 1}, ..." if interleaved else str(ranks - 1)
        return f"schedule {schedule} on {ranks} pipeline ranks takes {expected} cuts, not {len(cuts)}"
    if any(low >= high for low, high in pairwise((0, *cuts, layers))):
        return f"cuts must be strictly increasing layer numbers between 1 and {layers - 1}"
    return None
