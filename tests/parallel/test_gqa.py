"""Q, K and V at tensor degrees below, at and above the number of KV heads."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parallel import GQAQKVColumnParallelLinear, Mesh, Normal
from parallel.constraints import kv_replicas, valid_tensor_degrees
from parallel.gqa import ReplicatedKVLinear
from parallel.layout import layout_of
from tests.parallel.replicated import check, piece, whole
from tests.parity.harness import Case, train
from tests.pool import mesh

HIDDEN, HEAD = 5, 3


def fill(layer: GQAQKVColumnParallelLinear, rank: int) -> None:
    for name, parameter in layer.named_parameters():
        for box in layout_of(parameter).boxes(name, rank):
            Normal(1.0).fill(box.of(parameter.data), box, seed=1)


def distances(heads: int, kv_heads: int, sequence: bool, bias: bool) -> tuple[dict[str, float], list[Tensor]]:
    """How far from one process, where each query head's loss is a function of it and of its own K and V head.

    Returns:
        Largest differences by what differs, and this rank's K and V rows of the weight's gradient.
    """
    degree = torch.distributed.get_world_size()
    with mesh(tensor=degree, kv_replicas=kv_replicas(kv_heads, degree)) as m:
        axis = m.tensor

        def make(on: Mesh, rank: int, **options) -> GQAQKVColumnParallelLinear:
            layer = GQAQKVColumnParallelLinear(
                HIDDEN, heads, kv_heads, HEAD, on, bias=bias, dtype=torch.float64, **options
            )
            fill(layer, rank)
            return layer

        ours, dense = make(m, axis.rank, sequence_parallel=sequence), make(Mesh(rank=0), 0)
        x = torch.randn(2 * degree, HIDDEN, dtype=torch.float64)
        x_ours, x_dense = x.clone().requires_grad_(), x.clone().requires_grad_()
        mixing = torch.randn(heads, HEAD, dtype=torch.float64)

        def loss(y: Tensor, first: int, n: int, k: int) -> Tensor:
            """Σ over the query heads [first, first + n), of which group neighbours read the same of the k KV heads."""
            q, key, value = y.unflatten(1, (-1, HEAD)).split((n, k, k), 1)
            reads = torch.arange(n) * k // n
            return ((q * key[:, reads]).tanh() * value[:, reads] * mixing[first : first + n]).sum()

        own = heads // degree
        loss(
            ours(piece(x_ours, axis) if sequence else x_ours), axis.rank * own, own, ours.kv_heads
        ).backward()
        loss(dense(x_dense), 0, heads, kv_heads).backward()
        found = {"input's gradient": (x_ours.grad - x_dense.grad).abs().max().item()}
        key_values = []
        for (name, p), q in zip(ours.named_parameters(), dense.parameters(), strict=True):
            exact = {box.name: box.of(q.grad) for box in layout_of(q).boxes(name, 0)}
            for box in layout_of(p).boxes(name, axis.rank):
                mine = box.of(p.grad)
                found[box.name] = (mine - exact[box.name][box.index()]).abs().max().item()
                if box.replicas > 1:
                    key_values.append(mine.clone())
        return found, key_values


@pytest.mark.parametrize("degree", [2, 4, 8])
@settings(max_examples=5)
@given(data=st.data())
def test_trains_like_one_process(pool, degree, data):
    heads, kv_heads = data.draw(
        st.sampled_from(
            [
                (n, k)
                for n in (4, 6, 8, 12)
                for k in (1, 2, 3, 4, 8)
                if n % k == 0 and degree in valid_tensor_degrees(n, k)
            ]
        )
    )
    arguments = {"heads": heads, "kv_heads": kv_heads}
    arguments |= {"sequence": data.draw(st.booleans()), "bias": data.draw(st.booleans())}
    results = pool.run(distances, degree, **arguments)
    for found, _ in results:
        assert max(found.values()) < 1e-12, found
    replicas = kv_replicas(kv_heads, degree)
    for first in range(0, degree, replicas):
        for other in range(first, first + replicas):  # of one KV head
            pairs = zip(results[first][1], results[other][1], strict=True)
            assert all(torch.equal(mine, theirs) for mine, theirs in pairs)


def gradients(sequence: bool) -> bool:
    """gradcheck of the Function for shared KV heads: 4 ranks, 4 query and 2 KV heads."""
    with mesh(tensor=4, kv_replicas=2) as m:
        axis = m.tensor

        def stack(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return torch.cat([piece(q, axis), piece(k, axis, replicas=2), piece(v, axis, replicas=2)])

        def function(x: Tensor, q: Tensor, kv: Tensor, bias: Tensor) -> Tensor:
            x = piece(x, axis) if sequence else x
            weights, biases = (stack(q, *kv.chunk(2)), stack(*bias.split((4, 2, 2))))
            y = ReplicatedKVLinear.apply(x, weights, biases, axis, m.kv_replica, 1, sequence)
            return whole(y, axis, 1)

        return check(function, (4, 3), (4, 3), (4, 3), (8,))


@pytest.mark.parametrize("sequence", [False, True], ids=["whole sequences", "sequence parallel"])
def test_gradcheck(pool, sequence):
    assert all(pool.run(gradients, 4, sequence=sequence))


def key_values_after_training(steps: int) -> list[tuple[str, int, Tensor]]:
    """This rank's K and V weights, with the piece's place, after training at tensor degree 4 with 2 KV heads."""
    held: list[tuple[str, int, Tensor]] = []

    def keep(trainer, _) -> None:
        for name, parameter in trainer.named_parameters():
            for box in layout_of(parameter).boxes(name, trainer.mesh.tensor.rank):
                if 1 < box.replicas < trainer.mesh.tensor.size:
                    held.append((box.name, box.offsets[0], box.of(parameter.detach())))

    train(Case("llama tied", tensor=4, data=2), keep, steps=range(steps))
    return held


def test_replicas_of_a_kv_head_are_the_same_bits_after_50_steps(pool):
    before = pool.run(key_values_after_training, 8, steps=0)
    after = pool.run(key_values_after_training, 8, steps=50)
    copies: dict[tuple[str, int], list[Tensor]] = {}
    for rank in after:
        for name, offset, weight in rank:
            copies.setdefault((name, offset), []).append(weight)
    assert len(copies) == 2 * 2 * 2 * 2  # layers, K and V, weights and biases, heads
    for same in copies.values():
        assert len(same) == 4  # two tensor ranks on each of two data ranks
        assert all(torch.equal(same[0], other) for other in same)
    assert not torch.equal(before[0][0][2], after[0][0][2])


def test_degrees_that_do_not_fit_are_refused_with_their_neighbours():
    def make(tensor: int, replicas: int, heads: int = 8, kv_heads: int = 2) -> None:
        planned = Mesh(tensor=tensor, kv_replicas=replicas, rank=0)
        GQAQKVColumnParallelLinear(16, heads, kv_heads, 4, planned)

    assert valid_tensor_degrees(8, 2) == [1, 2, 4, 8]
    assert valid_tensor_degrees(56, 8) == [1, 2, 4, 8, 56]
    with pytest.raises(
        ValueError, match="tensor = 3 does not fit 8 query and 2 KV heads; nearest that do: 2, 4"
    ):
        make(3, 1)
    with pytest.raises(ValueError, match=r"tensor = 16 does not fit 8 query .* nearest that do: 8$"):
        make(16, 8)
    with pytest.raises(ValueError, match="3 KV heads do not divide 8 query heads"):
        make(1, 1, kv_heads=3)
    with pytest.raises(ValueError, match="2 KV heads over tensor = 8 need kv_replicas = 4, the mesh has 2"):
        make(8, 2)
