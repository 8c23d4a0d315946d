"""Matrix products on the host."""

import pytest
import torch

from parallel import host_products
from parallel.host_products import multiply, multiply_to, rounded_up

M, K, N = 192, 144, 160  # above `MIN_MULTIPLICATIONS`


@pytest.mark.parametrize("biased", [False, True])
def test_product_of_any_strides_matches_double_precision(biased, monkeypatch):
    """With oneDNN, even on processors where MKL is faster."""
    monkeypatch.setattr(host_products, "ONEDNN_IS_FASTER", bool(host_products.ONEDNN_PRODUCTS))
    generator = torch.Generator().manual_seed(0)
    bias = torch.randn(N, generator=generator) if biased else None
    for a_shape, b_shape in (((M, K), (K, N)), ((M, K), (N, K)), ((K, M), (K, N))):
        a, b = torch.randn(a_shape, generator=generator), torch.randn(b_shape, generator=generator)
        a, b = a if a.shape[0] == M else a.t(), b if b.shape[0] == K else b.t()
        assert a.numel() * N >= host_products.MIN_MULTIPLICATIONS
        expected = a.double() @ b.double() + (0 if bias is None else bias.double())
        for result in (multiply(a, b, bias), multiply_to(torch.empty(M, N), a, b, bias)):
            torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-4)


def test_rounded_sizes_are_few_and_close(monkeypatch):
    monkeypatch.setattr(host_products, "ONEDNN_IS_FASTER", True)
    rounded = {rows: rounded_up(rows, host_products.MIN_MULTIPLICATIONS) for rows in range(4097)}
    assert len(set(rounded.values())) < 100
    assert all(rows <= size <= max(rows + 7, rows * 17 / 16) for rows, size in rounded.items())
    assert rounded_up(1000, host_products.MIN_MULTIPLICATIONS // 1001) == 1000
