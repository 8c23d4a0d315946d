"""Compiled products on CPUs: by oneDNN like eager ones, with the same results, in cached graphs."""

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from modeling.compilation.compilers import Inductor
from parallel import host_products
from parallel.host_products import MIN_MULTIPLICATIONS, ONEDNN_PRODUCTS

M, K, N = 192, 144, 160


def products(total: Tensor, a: Tensor, b: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    """Three oneDNN products, one added to `total` in place; two for torch: a small one, a sum of matrices."""
    total.addmm_(a, b)
    return torch.addmm(bias, a, b), a @ b, a[:8] @ b, torch.addmm(bias.expand(M, N), a, b)


def inputs() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    total, a, b, bias = (torch.randn(shape, generator=generator) for shape in ((M, N), (K, M), (N, K), (N,)))
    return total, a.t(), b.t(), bias


@pytest.mark.compiles
def test_cached_graphs_multiply_large_matrices_by_onednn(tmp_path, monkeypatch):
    assert 8 * K * N < MIN_MULTIPLICATIONS <= M * K * N
    monkeypatch.setattr(host_products, "ONEDNN_IS_FASTER", bool(ONEDNN_PRODUCTS))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    exact = [x.double() for x in inputs()]
    expected = (*products(*exact), exact[0])
    compiler, found = Inductor("cpu"), []
    for _ in range(2):
        torch.compiler.reset()
        before = compiler.cache_counts()
        compiled = torch.compile(products, backend=compiler.compile, fullgraph=True, dynamic=False)
        arguments = inputs()
        results = compiled(*arguments)
        found.append([now - then for now, then in zip(compiler.cache_counts(), before, strict=True)])
        for result, reference in zip((*results, arguments[0]), expected, strict=True):
            torch.testing.assert_close(result.double(), reference, rtol=1e-5, atol=1e-4)
    assert found == [[1, 0], [0, 1]]  # misses, hits
    with profile(activities=[ProfilerActivity.CPU]) as record:
        compiled(*inputs())
    calls = [event.name for event in record.events()]
    assert calls.count("mkldnn::_linear_pointwise") == (3 if ONEDNN_PRODUCTS else 0)
