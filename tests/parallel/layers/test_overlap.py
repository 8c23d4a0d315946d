"""Products beside sequence parallelism's collectives: same results, and same graphs on all ranks."""

from dataclasses import replace

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
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
    """A backend of torch.compile that runs graphs as they are, and keeps their digests and our operators."""

    def __init__(self) -> None:
        self.digests: list[str] = []
        self.operators: set[str] = set()

    def compile(self, graph: GraphModule, inputs: list[torch.Tensor]) -> object:
        return aot_autograd(fw_compiler=self._record, bw_compiler=self._record)(graph, inputs)

    def _record(self, graph: GraphModule, _: list[torch.Tensor]) -> object:
        self.digests.append(manifest.digest(manifest.describe([graph])))
        names = {str(node.target) for node in graph.graph.nodes}
        self.operators |= {name.split(".")[1] for name in names if name.startswith("trainshed.")}
        return make_boxed_func(graph.forward)


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
    run = torch.compile(layers, backend=graphs.compile, fullgraph=True) if graphs else layers
    y = run(x)
    y.backward(gradient)
    return [y.detach(), x.grad, *(parameter.grad for parameter in layers.parameters() if not frozen)]


def compare(recipes: list[str], graphs_of: list[str]) -> list[str]:
    """Compare three chunks with none, also in FP8, and two in graphs. Returns the graphs' digests.

    Args:
        recipes: of FP8.
        graphs_of: those that are also compared in graphs, in operators and not; "" is no FP8.
    """
    size, digests = torch.distributed.get_world_size(), []
    with mesh(tensor=size, kv_replicas=max(1, size // 2)) as m:
        for recipe in ("", *recipes):
            products = Float8(recipe, emulated=True) if recipe else EXACT
            # Sums may have another order: in float64, in FP8 of its exact products in float32.
            tolerance = 2e-6 if recipe else 1e-13
            for frozen in (False, True):
                expected = train(m, 1, products, frozen)
                found = train(m, 3, products, frozen)
                torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
            expected = train(m, 1, products) if recipe in graphs_of else []
            for operators in (False, True) if expected else ():
                graphs = Graphs()
                m.tensor = replace(m.tensor, operators=operators)
                found = train(m, 2, products, graphs=graphs)
                torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
                assert graphs.operators == (OVERLAPPING if operators else set())
                digests += graphs.digests
    return digests


@pytest.mark.parametrize(
    ("degree", "recipes", "graphs_of"), [(2, [*FP8_MULTIPLE], ["rowwise"]), (4, ["tensorwise"], [])]
)
def test_chunks_do_not_change_results(pool, degree, recipes, graphs_of):
    """Also with replicated KV heads, in FP8, and of frozen layers, which reduce dX in chunks."""
    first, *others = pool.run(compare, degree, recipes=recipes, graphs_of=graphs_of)
    assert len(first) == 4 * len(graphs_of)
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
