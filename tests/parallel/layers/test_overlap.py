"""Products in chunks that overlap with sequence parallelism's collectives: results are unchanged."""

from dataclasses import replace

import pytest
import torch

from parallel import ColumnParallelLinear, RowParallelLinear
from parallel.layers.overlap import count_chunks
from parallel.mesh import Axis
from tests.pool import mesh

TOKENS, WIDTH = 48, 6


def train(tensor: Axis, compiled: bool) -> list[torch.Tensor]:
    """Output and gradients of a column and a row layer with sequence parallelism, on this rank."""
    torch.manual_seed(0)
    x, gradient = (torch.randn(TOKENS, WIDTH, dtype=torch.float64).chunk(tensor.size) for _ in range(2))
    options = {"sequence_parallel": True, "dtype": torch.float64}
    layers = torch.nn.Sequential(
        ColumnParallelLinear(WIDTH, 8, tensor, bias=True, **options),
        RowParallelLinear(8, WIDTH, tensor, **options),
    )
    for parameter in layers.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, dtype=torch.float64))
    local = x[tensor.rank].clone().requires_grad_()
    run = torch.compile(layers, backend="aot_eager", fullgraph=True) if compiled else layers
    y = run(local)
    y.backward(gradient[tensor.rank])
    return [y.detach(), local.grad, *(parameter.grad for parameter in layers.parameters())]


def compare(compiled: bool) -> None:
    """Compare three chunks, and two in a graph if `compiled`, with none."""
    with mesh(tensor=torch.distributed.get_world_size()) as m:
        expected = train(m.tensor, False)
        torch.testing.assert_close(
            train(replace(m.tensor, chunks=3), False), expected, rtol=1e-14, atol=1e-14
        )
        if compiled:
            found = train(replace(m.tensor, chunks=2), True)
            torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(("degree", "compiled"), [(2, True), (4, False)])
def test_chunks_do_not_change_results(pool, degree, compiled):
    pool.run(compare, degree, compiled=compiled)


@pytest.mark.parametrize(
    ("chunks", "rows", "row_bytes", "expected"),
    [
        (1, 1 << 20, 1 << 14, 1),
        (None, 8192, 8192, 4),  # 8B on 4 ranks
        (None, 4096, 8192, 2),
        (None, 2048, 8192, 1),  # rows too few
        (None, 8192, 1024, 1),  # bytes too few
        (3, 16, 1, 2),  # 8 rows per rank are not divisible by 3
        (8, 2, 1, 1),
    ],
)
def test_number_of_chunks_depends_on_the_sizes(chunks, rows, row_bytes, expected):
    assert count_chunks(rows, row_bytes, Axis("tensor", 2, chunks=chunks)) == expected
