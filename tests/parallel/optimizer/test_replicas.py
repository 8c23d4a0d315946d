"""Copies of the same weights on several ranks are compared bit by bit, and equal again once a checkpoint was loaded."""

from pathlib import Path

import torch
from torch import nn

from parallel import GQAQKVColumnParallelLinear, RMSNorm, ZeRO1, initialize
from parallel.checkpoint import checkpoint
from parallel.optimizer.replicas import differing_replicas
from tests.pool import mesh


def found_after_drift(folder: Path) -> list[list[str]]:
    """What is found at first, after one bit of a norm changed on rank 1, and of a KV head on rank 3 too, and after a resume."""
    with mesh(tensor=4, kv_replicas=2) as m:
        built = nn.ModuleDict(
            {"norm": RMSNorm(8, m.tensor), "qkv": GQAQKVColumnParallelLinear(8, 4, 2, 4, m)}
        )
        initialize(built, m.tensor, 1)
        optimizer = ZeRO1(built.named_parameters(), m)
        found = [differing_replicas(optimizer.buckets, m)]
        for rank, name in ((1, "norm.weight"), (3, "qkv.k.weight")):
            for box, states in optimizer.state_boxes():
                if m.rank == rank and box.name == name:
                    states["master"].view(torch.int32).view(-1)[0] += 1
            found.append(differing_replicas(optimizer.buckets, m))
        checkpoint.save(folder, optimizer, {})
        checkpoint.load(folder, optimizer)
        return [*found, differing_replicas(optimizer.buckets, m)]


def test_one_changed_bit_is_found_on_every_rank_until_a_resume(pool, tmp_path):
    found = [[], ["norm.weight"], ["norm.weight", "qkv.k.weight"], []]
    assert pool.run(found_after_drift, 4, folder=tmp_path / "step_1") == [found] * 4
