"""Triton kernel that sums the rows of each token's experts equals other devices' operators."""

import pytest
import torch


@pytest.mark.cuda
@pytest.mark.parametrize("weighted", [False, True])
def test_kernel_equals_operators(weighted):
    """Also if its last block of columns is incomplete, and for no tokens."""
    from parallel.experts import gpu_sums

    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(160, 1500, generator=generator)
    positions = torch.randint(len(rows), (37, 4), generator=generator)
    weights = torch.rand(37, 4, generator=generator) if weighted else None
    chosen = rows[positions] if weights is None else rows[positions] * weights[..., None]
    found = gpu_sums.sum_rows(rows.cuda(), positions.cuda(), None if weights is None else weights.cuda())
    torch.testing.assert_close(found.cpu(), chosen.sum(1), rtol=1e-5, atol=1e-5)
    assert gpu_sums.sum_rows(rows.cuda(), positions[:0].cuda(), None).shape == (0, 1500)
