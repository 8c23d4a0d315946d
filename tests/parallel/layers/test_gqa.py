"""Fused QKV projection at tensor degrees below, at and above the number of KV heads."""

from itertools import cycle, groupby

import pytest
import torch
from torch import Tensor

from parallel import GQAQKVColumnParallelLinear, Mesh, Normal
from parallel.constraints import kv_replicas, valid_tensor_degrees
from parallel.layers.gqa import ReplicatedKVLinear
from parallel.layers.products import EXACT
from parallel.layout import layout_of
from tests.parallel.replicated import check, gather, shard
from tests.parity.harness import Case, train
from tests.pool import mesh

HIDDEN, HEAD = 5, 3


def fill(layer: GQAQKVColumnParallelLinear, rank: int) -> None:
    for name, parameter in layer.named_parameters():
        for box in layout_of(parameter).boxes(name, rank):
            Normal(1.0).fill(box.view(parameter.data), box, seed=1)


def distances(m: Mesh, heads: int, kv_heads: int, sequence: bool, bias: bool) -> tuple[dict, list[Tensor]]:
    """Largest differences from one process; each query head's loss depends on it and on its K and V head.

    Returns:
        Differences by name, and this rank's K and V rows of the weight's gradient.
    """
    axis = m.tensor

    def make(on: Mesh, rank: int, **options) -> GQAQKVColumnParallelLinear:
        layer = GQAQKVColumnParallelLinear(
            HIDDEN, heads, kv_heads, HEAD, on, bias=bias, dtype=torch.float64, **options
        )
        fill(layer, rank)
        return layer

    ours, dense = make(m, axis.rank, sequence_parallel=sequence), make(Mesh(rank=0), 0)
    x = torch.randn(2 * axis.size, HIDDEN, dtype=torch.float64)
    x_ours, x_dense = x.clone().requires_grad_(), x.clone().requires_grad_()
    mixing = torch.randn(heads, HEAD, dtype=torch.float64)

    def loss(y: Tensor, first: int, n: int, k: int) -> Tensor:
        """Sum over the query heads [first, first + n), grouped over k KV heads."""
        q, key, value = y.unflatten(1, (-1, HEAD)).split((n, k, k), 1)
        reads = torch.arange(n) * k // n
        return ((q * key[:, reads]).tanh() * value[:, reads] * mixing[first : first + n]).sum()

    local = heads // axis.size
    y = ours(shard(x_ours, axis) if sequence else x_ours)
    loss(y, axis.rank * local, local, ours.kv_heads).backward()
    loss(dense(x_dense), 0, heads, kv_heads).backward()
    found = {"input's gradient": (x_ours.grad - x_dense.grad).abs().max().item()}
    key_values = []
    for (name, p), q in zip(ours.named_parameters(), dense.parameters(), strict=True):
        exact = {box.name: box.view(q.grad) for box in layout_of(q).boxes(name, 0)}
        for box in layout_of(p).boxes(name, axis.rank):
            mine = box.view(p.grad)
            found[box.name] = (mine - exact[box.name][box.index()]).abs().max().item()
            if box.replicas > 1:
                key_values.append(mine.clone())
    return found, key_values


def all_distances(cases: list[tuple[int, int, bool, bool]]) -> list[tuple[dict, list[Tensor]]]:
    """`distances` of each case; cases with the same replication share a mesh."""
    degree, results = torch.distributed.get_world_size(), []
    for replicas, group in groupby(cases, lambda case: kv_replicas(case[1], degree)):
        with mesh(tensor=degree, kv_replicas=replicas) as m:
            results += [distances(m, *case) for case in group]
    return results


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_gradients_match_one_process(pool, degree):
    heads = [
        (n, k)
        for k in (1, 2, 3, 4, 8)
        for n in (4, 6, 8, 12)
        if n % k == 0 and degree in valid_tensor_degrees(n, k)
    ]
    options = [(False, False), (True, True), (True, False), (False, True)]  # sequence parallel, bias
    cases = [(*case, *option) for case, option in zip(heads, cycle(options), strict=False)]
    for (_, kv_heads, *_), *results in zip(cases, *pool.run(all_distances, degree, cases=cases), strict=True):
        for found, _ in results:
            assert max(found.values()) < 1e-12, found
        replicas = kv_replicas(kv_heads, degree)
        for first in range(0, degree, replicas):
            for other in range(first, first + replicas):  # of one KV head
                pairs = zip(results[first][1], results[other][1], strict=True)
                assert all(torch.equal(mine, theirs) for mine, theirs in pairs)


def gradients(sequence: bool) -> bool:
    """gradcheck of the Function for replicated KV heads: 4 ranks, 4 query and 2 KV heads."""
    with mesh(tensor=4, kv_replicas=2) as m:
        axis = m.tensor

        def stack(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return torch.cat([shard(q, axis), shard(k, axis, replicas=2), shard(v, axis, replicas=2)])

        def function(x: Tensor, q: Tensor, kv: Tensor, bias: Tensor) -> Tensor:
            x = shard(x, axis) if sequence else x
            weights, biases = (stack(q, *kv.chunk(2)), stack(*bias.split((4, 2, 2))))
            y = ReplicatedKVLinear.apply(x, weights, biases, axis, m.kv_replica, 1, sequence, EXACT)
            return gather(y, axis, 1)

        return check(function, (4, 3), (4, 3), (4, 3), (8,))


@pytest.mark.parametrize("sequence", [False, True], ids=["full sequences", "sequence parallel"])
def test_gradients_match_finite_differences(pool, sequence):
    assert all(pool.run(gradients, 4, sequence=sequence))


def key_values_over_training(steps: int) -> list[tuple[str, int, Tensor, Tensor]]:
    """Name, offset, and value before and after training of a rank's K, V weights; tensor 4, 2 KV heads."""
    weights: list[tuple[str, int, Tensor, Tensor]] = []

    def collect(trainer, _) -> None:
        for name, parameter in trainer.stages[0].named_parameters():
            for box in layout_of(parameter).boxes(name, trainer.mesh.tensor.rank):
                if 1 < box.replicas < trainer.mesh.tensor.size:
                    local = box.view(parameter.detach())
                    weights.append((box.name, box.offsets[0], local.clone(), local))

    train(Case("llama tied", tensor=4, data=2), collect, steps=range(steps))
    return weights


def test_kv_head_replicas_stay_bit_identical_over_10_steps(pool):
    copies: dict[tuple[str, int], list[Tensor]] = {}
    for rank in pool.run(key_values_over_training, 8, steps=10):
        for name, offset, before, after in rank:
            assert not torch.equal(before, after)
            copies.setdefault((name, offset), []).append(after)
    assert len(copies) == 2 * 2 * 2 * 2  # layers, K and V, weights and biases, heads
    for same in copies.values():
        assert len(same) == 4  # two tensor ranks on each of two data ranks
        assert all(torch.equal(same[0], other) for other in same)


def test_invalid_degrees_are_rejected_with_nearest_valid():
    def make(tensor: int, replicas: int, heads: int = 8, kv_heads: int = 2) -> None:
        planned = Mesh(tensor=tensor, kv_replicas=replicas, rank=0)
        GQAQKVColumnParallelLinear(16, heads, kv_heads, 4, planned)

    assert valid_tensor_degrees(8, 2) == [1, 2, 4, 8]
    assert valid_tensor_degrees(56, 8) == [1, 2, 4, 8, 56]
    with pytest.raises(
        ValueError, match="tensor = 3 is invalid for 8 query and 2 KV heads; nearest valid: 2, 4"
    ):
        make(3, 1)
    with pytest.raises(ValueError, match=r"tensor = 16 is invalid for 8 query .* nearest valid: 8$"):
        make(16, 8)
    with pytest.raises(ValueError, match="3 KV heads do not divide 8 query heads"):
        make(1, 1, kv_heads=3)
    with pytest.raises(ValueError, match="2 KV heads over tensor = 8 need kv_replicas = 4, the mesh has 2"):
        make(8, 2)
