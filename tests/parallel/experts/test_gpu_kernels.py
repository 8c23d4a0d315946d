"""Triton kernels of experts equal the operators that other devices use."""

import pytest
import torch

from parallel.experts.activations import ACTIVATIONS


@pytest.mark.cuda
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_equal_operators(activation, biased):
    """Also if a kernel's last block is incomplete, for NaN, and for zero rows."""
    from parallel.experts import gpu_kernels

    rows, f, experts = 37, 1500, 5
    generator = torch.Generator().manual_seed(0)
    product = 4 * torch.randn(rows, 2 * f, generator=generator)
    product[3, 7] = torch.nan
    grad, scale = torch.randn(rows, f, generator=generator), torch.rand(rows, generator=generator)
    bias = torch.randn(experts, 2 * f, generator=generator)
    owners = torch.randint(experts, (rows,), generator=generator, dtype=torch.int32)
    hidden = product + bias[owners.long()] if biased else product
    expected = ACTIVATIONS[activation].forward(hidden)
    of = ACTIVATIONS[activation].backward(grad.clone(), hidden, scale[:, None])
    wanted = (expected, of[0] * scale[:, None], *of[1:])

    product, grad, scale, bias, owners = (each.cuda() for each in (product, grad, scale, bias, owners))
    added = (bias, owners) if biased else (None, None)
    found = [gpu_kernels.forward(product, activation, *added)]
    found += gpu_kernels.backward(grad, product, scale, activation, *added)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-4, atol=1e-4, equal_nan=True)
    assert gpu_kernels.forward(product[:0], activation, *added).shape == (0, f)


@pytest.mark.cuda
@pytest.mark.parametrize("weighted", [False, True])
def test_sum_of_rows_equals_operators(weighted):
    """Also if the last block of columns is incomplete, and for no tokens."""
    from parallel.experts import gpu_kernels

    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(160, 1500, generator=generator)
    positions = torch.randint(len(rows), (37, 4), generator=generator)
    weights = torch.rand(37, 4, generator=generator) if weighted else None
    chosen = rows[positions] if weights is None else rows[positions] * weights[..., None]
    found = gpu_kernels.sum_rows(rows.cuda(), positions.cuda(), None if weights is None else weights.cuda())
    torch.testing.assert_close(found.cpu(), chosen.sum(1), rtol=1e-5, atol=1e-5)
    assert gpu_kernels.sum_rows(rows.cuda(), positions[:0].cuda(), None).shape == (0, 1500)
