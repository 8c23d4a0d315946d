"""Tensor-parallel layers against the same layer on one process, in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from parallel import (
    ColumnParallelLinear,
    Embedding,
    LayerNorm,
    Mesh,
    Normal,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    initialize,
)
from parallel.collectives import all_reduce
from parallel.layers.linear import ColumnLinear, RowLinear
from parallel.layout import layout_of
from parallel.mesh import Axis
from tests.parallel.replicated import check, gather, shard
from tests.pool import mesh

TOLERANCE = 1e-12
ONE = Axis("tensor")


def fill(layer: nn.Module, rank: int) -> None:
    """Fill all parameters, biases and norms included, with random values keyed by global name."""
    for name, parameter in layer.named_parameters():
        parameter.data.zero_()
        for box in layout_of(parameter).boxes(name, rank):
            Normal(1.0).fill(box.view(parameter.data), box, seed=1)


def distances(make, sequence: bool, x: Tensor, split: int | None, collect: int | None) -> dict[str, float]:
    """Largest differences between a layer on a tensor axis over all ranks and the same on one process.

    Args:
        make: (axis, sequence parallel) -> layer.
        x: full input; token ids for embeddings.
        split, collect: dims along which the input and the output are sharded over the axis; None: replicated.
    """
    with mesh(tensor=torch.distributed.get_world_size()) as m:
        axis = m.tensor
        layers = make(axis, sequence), make(ONE, False)
        for layer, rank in zip(layers, (axis.rank, 0), strict=True):
            fill(layer, rank)
        ours, dense = layers
        x_ours, x_dense = x.clone(), x.clone()
        if x.is_floating_point():
            x_ours.requires_grad_(), x_dense.requires_grad_()
        y = ours(x_ours if split is None else shard(x_ours, axis, split))
        y = y if collect is None else gather(y, axis, collect)
        expected = dense(x_dense)
        gradient = torch.randn(expected.shape, dtype=expected.dtype)
        y.backward(gradient)
        expected.backward(gradient)
        found = {"output": (y - expected).abs().max().item()}
        if x.is_floating_point():
            found["input's gradient"] = (x_ours.grad - x_dense.grad).abs().max().item()
        for (name, p), q in zip(ours.named_parameters(), dense.parameters(), strict=True):
            mine = all_reduce(p.grad, axis) if "tensor" in layout_of(p).partial_axes else p.grad
            exact = {box.name: box.view(q.grad) for box in layout_of(q).boxes(name, 0)}
            for box in layout_of(p).boxes(name, axis.rank):
                difference = box.view(mine) - exact[box.name][box.index()]
                found[f"gradient of {box.name}"] = difference.abs().max().item()
        return found


def column(
    tokens: int, width: int, sizes: dict[str, int] | int, bias: bool, sequence: bool
) -> dict[str, float]:
    def make(axis: Axis, sequence: bool) -> nn.Module:
        return ColumnParallelLinear(
            width, sizes, axis, bias=bias, sequence_parallel=sequence, dtype=torch.float64
        )

    class Sections(nn.Module):
        """The layer with its output's sections gathered in the order of one process, [gate; up]."""

        def __init__(self, axis: Axis, sequence: bool) -> None:
            super().__init__()
            self.layer, self.axis = make(axis, sequence), axis

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            layout = layout_of(self.layer.weight)
            parts = y.split([layout.local_rows(section) for section in layout.sections], 1)
            return y if self.axis.size == 1 else torch.cat([gather(part, self.axis, 1) for part in parts], 1)

    x = torch.randn(tokens, width, dtype=torch.float64)
    return distances(Sections, sequence, x, 0 if sequence else None, None)


def row(tokens: int, width: int, out: int, bias: bool, sequence: bool) -> dict[str, float]:
    class Columns(nn.Module):
        """The layer applied to its shard of the input's columns."""

        def __init__(self, axis: Axis, sequence: bool) -> None:
            super().__init__()
            self.axis = axis
            self.layer = RowParallelLinear(
                width, out, axis, bias=bias, sequence_parallel=sequence, dtype=torch.float64
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x if self.axis.size == 1 else shard(x, self.axis, 1))

    x = torch.randn(tokens, width, dtype=torch.float64)
    return distances(Columns, sequence, x, None, 0 if sequence else None)


def embedding(kind: type, tokens: int, rows: int, width: int, sequence: bool) -> dict[str, float]:
    def make(axis: Axis, sequence: bool) -> nn.Module:
        return kind(rows, width, axis, sequence_parallel=sequence, dtype=torch.float64)

    ids = torch.randint(0, rows, (1, tokens))
    return distances(make, sequence, ids, None, 0 if sequence else None)


def norm(kind: type, tokens: int, width: int, sequence: bool) -> dict[str, float]:
    def make(axis: Axis, sequence: bool) -> nn.Module:
        return kind(width, axis, sequence_parallel=sequence, dtype=torch.float64)

    x = torch.randn(tokens, width, dtype=torch.float64)
    return distances(make, sequence, x, 0 if sequence else None, 0 if sequence else None)


def agrees(pool, function, degree: int, **arguments) -> None:
    for found in pool.run(function, degree, **arguments):
        assert max(found.values()) < TOLERANCE, found


few = settings(max_examples=8)
sizes = st.integers(1, 6)
degrees = st.sampled_from([2, 4])


@few
@given(degree=degrees, data=st.data())
def test_column_layer_matches_one_process(pool, degree, data):
    sections = data.draw(st.lists(sizes, min_size=1, max_size=3))
    out = {f"part{i}": size * degree for i, size in enumerate(sections)}
    agrees(
        pool, column, degree, tokens=data.draw(sizes) * degree, width=data.draw(sizes), bias=data.draw(st.booleans()),
        sizes=out if len(out) > 1 else out["part0"], sequence=data.draw(st.booleans()),
    )  # fmt: skip


@few
@given(degree=degrees, data=st.data())
def test_row_layer_matches_one_process(pool, degree, data):
    agrees(
        pool, row, degree, tokens=data.draw(sizes) * degree, width=data.draw(sizes) * degree, out=data.draw(sizes),
        bias=data.draw(st.booleans()), sequence=data.draw(st.booleans()),
    )  # fmt: skip


@pytest.mark.parametrize("kind", [VocabParallelEmbedding, Embedding])
@few
@given(degree=degrees, data=st.data())
def test_embeddings_match_one_process(pool, kind, degree, data):
    agrees(
        pool, embedding, degree, kind=kind, tokens=data.draw(sizes) * degree, rows=data.draw(st.integers(1, 13)),
        width=data.draw(sizes), sequence=data.draw(st.booleans()),
    )  # fmt: skip


@pytest.mark.parametrize("sequence", [False, True], ids=["full sequences", "sequence parallel"])
@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_norms_match_one_process(pool, kind, sequence):
    agrees(pool, norm, 2, kind=kind, tokens=6, width=5, sequence=sequence)


def gradients(sequence: bool) -> bool:
    """gradcheck of the autograd Functions of column and row layers."""
    with mesh(tensor=torch.distributed.get_world_size()) as m:
        axis = m.tensor

        def column(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            x = shard(x, axis) if sequence else x
            return gather(
                ColumnLinear.apply(x, shard(weight, axis), shard(bias, axis), axis, sequence), axis, 1
            )

        def row(x: Tensor, weight: Tensor) -> Tensor:
            y = RowLinear.apply(shard(x, axis, 1), shard(weight, axis, 1), axis, sequence)
            return gather(y, axis) if sequence else y

        return check(column, (4, 3), (6, 3), (6,)) and check(row, (4, 6), (3, 6))


@pytest.mark.parametrize("sequence", [False, True], ids=["full sequences", "sequence parallel"])
def test_gradients_match_finite_differences(pool, sequence):
    assert all(pool.run(gradients, 2, sequence=sequence))


def compiled() -> list[float]:
    """Differences between eager and compiled layers."""
    with mesh(tensor=2) as m:
        up = ColumnParallelLinear(8, 16, m.tensor, bias=True, sequence_parallel=True)
        down = RowParallelLinear(16, 8, m.tensor, bias=True, sequence_parallel=True)
        both = nn.Sequential(up, nn.SiLU(), down)
        initialize(both.named_parameters(), m.tensor, 1)
        x = torch.randn(6, 8)
        results = []
        for function in (both, torch.compile(both, backend="aot_eager", fullgraph=True)):
            each = x.clone().requires_grad_()
            y = function(each)
            y.square().sum().backward()
            results.append((y, each.grad, up.weight.grad.clone()))
            both.zero_grad()
        return [(a - b).abs().max().item() for a, b in zip(*results, strict=True)]


def test_compiles_to_one_graph_with_equal_results(pool):
    assert all(max(found) < 1e-6 for found in pool.run(compiled, 2))


def test_indivisible_sizes_are_rejected_with_nearest_valid():
    axis = Mesh(tensor=4, rank=0).tensor
    with pytest.raises(
        ValueError, match=r"ColumnParallelLinear: out_features = 10 .* tensor = 4; nearest .* 8, 12"
    ):
        ColumnParallelLinear(8, 10, axis)
    with pytest.raises(ValueError, match=r"ColumnParallelLinear: out_features\[up\] = 10"):
        ColumnParallelLinear(8, {"gate": 8, "up": 10}, axis)
    with pytest.raises(ValueError, match=r"RowParallelLinear: in_features = 3 .* nearest valid: 4$"):
        RowParallelLinear(3, 8, axis)


def rejections() -> list[str]:
    """Error messages of a layer for invalid inputs, on each rank."""
    messages = []
    with mesh(tensor=2) as m:
        layer = ColumnParallelLinear(8, 16, m.tensor)
        for x in (torch.zeros(4, 7), torch.zeros(1, 4, 8), torch.zeros(4, 8, dtype=torch.bfloat16)):
            try:
                layer(x)
            except ValueError as error:
                messages.append(str(error))
    return messages


def test_invalid_inputs_are_rejected_on_every_rank_before_communication(pool):
    for messages in pool.run(rejections, 2):
        assert messages == [
            "ColumnParallelLinear: input has shape (4, 7), expected (tokens, 8)",
            "ColumnParallelLinear: input has shape (1, 4, 8), expected (tokens, 8)",
            "ColumnParallelLinear: input is torch.bfloat16, expected torch.float32 like the weight",
        ]
