"""Products that overlap with sequence parallelism's collectives: results are unchanged, and so are graphs of ranks."""

from dataclasses import replace

import pytest
import torch
from torch.fx import GraphModule

from modeling.compilation import manifest
from parallel import ColumnParallelLinear, GQAQKVColumnParallelLinear, RowParallelLinear
from parallel.constraints import FP8_MULTIPLE
from parallel.layers.overlap import count_chunks
from parallel.layers.products import EXACT, Float8, Products
from parallel.mesh import Axis, Mesh
from tests.pool import mesh

TOKENS, WIDTH, HEAD = 192, 64, 32
OVERLAPPING = {"gather_product", "scatter_product", "gather_beside_product", "scatter_beside_product"}


class Graphs:
    """A backend of torch.compile that runs captured graphs, and keeps their digests and our operators."""

    def __init__(self) -> None:
        self.digests: list[str] = []
        self.operators: set[str] = set()

    def __call__(self, graph: GraphModule, inputs: list[torch.Tensor]) -> object:
        run, graphs = manifest.capture(graph, inputs)
        self.digests.append(manifest.digest(manifest.describe(graphs)))
        names = {str(node.target) for each in graphs for node in each.graph.nodes}
        self.operators |= {name.split(".")[1] for name in names if name.startswith("trainshed.")}
        return run


def train(
    m: Mesh,
    chunks: int | None,
    products: Products = EXACT,
    frozen: bool = False,
    graphs: Graphs | None = None,
) -> list[torch.Tensor]:
    """Output and gradients of QKV, row and column layers with sequence parallelism, on this rank."""
    torch.manual_seed(0)
    tensor, dtype = replace(m.tensor, chunks=chunks), torch.float64 if products is EXACT else torch.float32
    x, gradient = (torch.randn(TOKENS, WIDTH, dtype=dtype).chunk(tensor.size)[tensor.rank] for _ in range(2))
    options = {"sequence_parallel": True, "dtype": dtype, "products": products}
    layers = torch.nn.Sequential(
        GQAQKVColumnParallelLinear(WIDTH, 4, 2, HEAD, m, bias=True, **options),
        RowParallelLinear(4 * HEAD + 4 * HEAD * m.kv_replicas, WIDTH, tensor, **options),
        ColumnParallelLinear(WIDTH, 64 * tensor.size, tensor, bias=True, **options),
        RowParallelLinear(64 * tensor.size, WIDTH, tensor, **options),
    )
    layers[0].axis = tensor
    for parameter in layers.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, dtype=dtype) / 8)
        parameter.requires_grad_(not frozen)
    x = x.clone().requires_grad_()
    run = torch.compile(layers, backend=graphs, fullgraph=True) if graphs else layers
    y = run(x)
    y.backward(gradient)
    return [y.detach(), x.grad, *(parameter.grad for parameter in layers.parameters() if not frozen)]


def compare(recipes: list[str], compiled: bool) -> list[str]:
    """Compare three chunks, and two in a graph if `compiled`, with none. Returns the graphs' digests."""
    size, digests = torch.distributed.get_world_size(), []
    every: list[Products] = [EXACT, *(Float8(recipe, emulated=True) for recipe in recipes)]
    with mesh(tensor=size, kv_replicas=max(1, size // 2)) as m:
        for products in every:
            for frozen in (False, True):
                expected = train(m, 1, products, frozen)
                # In float64 sums may have another order; products of FP8 are exact in float32, whose sums may, too.
                tolerance = 1e-13 if products is EXACT else 2e-6
                found = [train(m, 3, products, frozen)]
                if compiled:
                    torch.compiler.reset()
                    graphs = Graphs()
                    found.append(train(m, 2, products, frozen, graphs))
                    beside = set() if frozen else {name for name in OVERLAPPING if "beside" in name}
                    assert graphs.operators & OVERLAPPING == {"gather_product", "scatter_product"} | beside
                    digests += graphs.digests
                for each in found:
                    torch.testing.assert_close(each, expected, rtol=tolerance, atol=tolerance)
    return digests


@pytest.mark.parametrize(("degree", "compiled"), [(2, True), (4, False)])
def test_chunks_do_not_change_results(pool, degree, compiled):
    """Also with replicated KV heads, in FP8, and of frozen layers, whose input gradients are reduced in chunks."""
    first, *others = pool.run(compare, degree, recipes=[*FP8_MULTIPLE], compiled=compiled)
    assert all(digests == first for digests in others)


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
