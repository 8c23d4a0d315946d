"""In-graph attention over a context axis: dense formula, masks and bounds, same graphs on all ranks."""

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd

from parallel.attention import kernels
from parallel.attention.attention import attention
from tests.parallel.attention.reference import Bounds, Case
from tests.parallel.attention.test_ring import ring, worst
from tests.pool import mesh


def attend(cases, kernel, compiled=False):
    """This rank's shards for each case, and the code of the last one's graphs, if compiled."""
    kernels.register_kernel("bounds", Bounds())
    texts = []

    def keep(graph, _):
        texts.append(graph.print_readable(print_output=False))
        return graph

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    function = torch.compile(attention, fullgraph=True, dynamic=False, backend=backend)
    with mesh(context=torch.distributed.get_world_size(), graph_kernel=kernel) as made:
        shards = [ring(case, made.context, function if compiled else attention) for case in cases]
    return shards, texts


@pytest.mark.parametrize("size", [2, 4])
def test_matches_dense_formula(pool, size):
    s = 16 * size
    documents = (s // 2 - 3, 1, s // 4, s // 4 + 2)
    shape = {"b": 2, "n": 6, "k": 2, "s": s, "dtype": torch.float64}
    masks = [{"causal": causal} for causal in (True, False)]
    # Windows within a chunk of the ring, over several, and over all.
    masks += [{"window": window, "sinks": window != 3} for window in (1, 3, 8, 21, 2 * s)]
    masks += [{"window": 21, "soft_cap": 0.5}]
    cases = [Case(**shape, **mask, documents=lengths) for mask in masks for lengths in (None, documents)]
    cases.append(Case(n=4, k=1, s=s, dtype=torch.bfloat16))
    for kernel in ("math", "bounds"):
        parts = [shards for shards, _ in pool.run(attend, size, cases=cases, kernel=kernel)]
        for case, *shards in zip(cases, *parts, strict=True):
            assert worst(shards, case) < case.tolerance(), (kernel, case)


@pytest.mark.parametrize(
    ("kernel", "documents"), [("math", (70, 1, 100, 69)), ("bounds", (70, 1, 430, 99, 600))]
)
def test_compiles_to_the_same_plain_graphs_on_all_ranks(pool, kernel, documents):
    """With bounds, only the causal squares need a mask, also if a chunk has two tiles of rows."""
    cases = [Case(b=2, s=sum(documents), documents=documents, sinks=True)]
    (shards, texts), *others = pool.run(attend, 2, cases=cases, kernel=kernel, compiled=True)
    assert worst([shards[0], *(other[0] for other, _ in others)], cases[0]) < cases[0].tolerance()
    assert [other for _, other in others] == [texts]
    assert len(texts) == 2
    assert "ops.trainshed." not in "".join(texts)
    assert ("searchsorted" in texts[0]) == (kernel == "bounds")
