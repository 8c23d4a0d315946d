"""Degrees of parallelism: derived ones, valid ones, and which is named as the nearest."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.constraints import valid_tensor_degrees
from profiles import resolve
from profiles.errors import ProfileError
from tests.profiles.pair import PAIR

EIGHT = ["parallel.tensor=8", "cluster.devices_per_node=8"]


def test_kv_replication_is_derived():
    profile = resolve.load(PAIR, EIGHT)
    assert profile.kv_replication == 4
    resolve.check(resolve.load(PAIR, ["parallel.tensor=1"]))  # one key alone, as on the command line


def test_degrees_follow_from_the_cluster():
    overrides = ["cluster.devices_per_node=8", "train.micro_batch_size=1", "train.global_batch_size=16"]
    profile = resolve.load(PAIR, overrides)
    assert (profile.world_size, profile.data_parallel, profile.accumulation_steps) == (8, 4, 4)


def brute_force(heads: int, kv_heads: int, tensor: int) -> bool:
    """Whether query heads divide evenly over ranks, each with exactly its heads' KV heads, shared evenly.

    Query head q reads KV head q // (heads / kv_heads).
    """
    if tensor > heads or heads % tensor:
        return False
    size, group = heads // tensor, heads // kv_heads
    needs = [{q // group for q in range(rank * size, (rank + 1) * size)} for rank in range(tensor)]
    holders = [sum(kv in need for need in needs) for kv in range(kv_heads)]
    return (
        len({len(need) for need in needs}) == 1
        and len(set(holders)) == 1
        and (max(holders) == 1 or size <= group)
    )


@given(st.integers(1, 16), st.integers(1, 12), st.integers(1, 200))
def test_valid_tensor_degrees_divide_heads_evenly(kv_heads, group, tensor):
    heads = kv_heads * group
    valid = valid_tensor_degrees(heads, kv_heads)
    assert (tensor in valid) == brute_force(heads, kv_heads, tensor)


@settings(max_examples=30)
@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 70))
def test_rejected_degree_names_the_nearest_degrees_that_fit_the_cluster(kv_heads, group, tensor):
    heads = kv_heads * group
    overrides = [
        f"model.num_attention_heads={heads}",
        f"model.num_key_value_heads={kv_heads}",
        "model.head_dim=2",
        "model.intermediate_size=5040",
        f"parallel.tensor={tensor}",
        "cluster.device=cuda",
        f"cluster.devices_per_node={tensor}",
        "parallel.sequence_parallel=false",
        "train.micro_batch_size=1",
        "train.global_batch_size=5040",
    ]
    valid = [t for t in range(1, heads + 1) if brute_force(heads, kv_heads, t)]
    profile = resolve.load(PAIR, overrides)
    if tensor in valid:
        if 5040 % tensor == 0:
            resolve.check(profile)
        return
    with pytest.raises(ProfileError, match=re.escape(f"parallel.tensor = {tensor}")) as caught:
        resolve.check(profile)
    divides = [t for t in valid if tensor % t == 0 and 5040 % t == 0 and 5040 % (tensor // t) == 0]
    if divides:
        assert caught.value.choices == (max(divides),)
