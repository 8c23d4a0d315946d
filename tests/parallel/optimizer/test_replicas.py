"""Replicated weights: copies are compared bitwise, and equal after a synchronization or a resume."""

from pathlib import Path

import pytest
import torch
from torch import nn

from parallel import GQAQKVColumnParallelLinear, RMSNorm, ShardedAdamW, initialize
from parallel.checkpoint import checkpoint
from parallel.optimizer.arithmetic import EAGER
from parallel.optimizer.replicas import ReplicaCheck, differing_replicas, synchronize_replicas
from tests.pool import mesh

NORM, KEY = "norm.weight", "qkv.k.weight"


def build(m) -> ShardedAdamW:
    modules = {"norm": RMSNorm(8, m.tensor), "qkv": GQAQKVColumnParallelLinear(8, 4, 2, 4, m)}
    model = nn.ModuleDict(modules)
    initialize(model.named_parameters(), m.tensor, 1)
    return ShardedAdamW(model.named_parameters(), m)


def change(optimizer: ShardedAdamW, m, rank: int, name: str, state: str = "master", bits: int = 1) -> None:
    """Change a weight's first element on a rank."""
    for box, states in optimizer.state_boxes():
        if m.rank == rank and box.name == name:
            states[state].view(torch.int32).view(-1)[0] += bits


def found_after_drift(folder: Path) -> list[list[str]]:
    """Differing weights at first, after a bit flip in a norm, then in a KV head, and after a resume."""
    with mesh(tensor=4, kv_replicas=2) as m:
        optimizer = build(m)
        found = [list(differing_replicas(optimizer.buckets, m))]
        for rank, name in ((1, NORM), (3, KEY)):
            change(optimizer, m, rank, name)
            found.append(list(differing_replicas(optimizer.buckets, m)))
        checkpoint.save(folder, optimizer, {})
        checkpoint.load(folder, optimizer)
        return [*found, list(differing_replicas(optimizer.buckets, m))]


def test_one_changed_bit_is_found_on_every_rank_until_a_resume(pool, tmp_path):
    found = [[], [NORM], [NORM, KEY], []]
    assert pool.run(found_after_drift, 4, folder=tmp_path / "step_1") == [found] * 4


def counts_and_sizes(degrees: dict[str, int], rank: int, name: str) -> list:
    """Differing buckets (initial, changed, synchronized), differences, and whether the change was undone."""
    with mesh(**degrees) as m:
        optimizer = build(m)
        check = ReplicaCheck(optimizer.buckets, m, EAGER)
        counts = [check.count().item()]
        states = [
            state.clone()
            for bucket in optimizer.buckets
            for state in (bucket.master, bucket.states["exp_avg"])
        ]
        change(optimizer, m, rank, name, bits=1 << 20)
        change(optimizer, m, rank, name, state="exp_avg")
        counts.append(check.count().item())
        largest = differing_replicas(optimizer.buckets, m)
        synchronize_replicas(optimizer.buckets, m)
        counts.append(check.count().item())
        now = (state for bucket in optimizer.buckets for state in (bucket.master, bucket.states["exp_avg"]))
        return [counts, largest, all(map(torch.equal, now, states))]


TENSOR = {"tensor": 4, "kv_replicas": 2}
REPLICATED = {"data": 4, "shard_degree": 2}  # each shard on two ranks


@pytest.mark.parametrize(
    ("degrees", "rank", "name", "seen"),
    [
        (TENSOR, 1, NORM, [1, 1, 1, 1]),
        (TENSOR, 3, KEY, [0, 0, 1, 1]),  # the ranks with that head
        (REPLICATED, 2, NORM, [1, 0, 1, 0]),  # the ranks with that shard
    ],
    ids=["norm", "KV head", "replicated shard"],
)
def test_drift_is_counted_on_ranks_with_copies_and_undone_from_the_first(degrees, rank, name, seen, pool):
    ranks = pool.run(counts_and_sizes, 4, degrees=degrees, rank=rank, name=name)
    assert [counts for counts, *_ in ranks] == [[0, count, 0] for count in seen]
    assert all(list(largest) == [name] and largest[name] > 0 for _, largest, _ in ranks)
    assert all(restored for *_, restored in ranks)
