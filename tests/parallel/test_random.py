"""Stateless dropout: rate, independence, compilation, and attention with dropout."""

import pytest
import torch

from parallel.attention.attention import attention
from parallel.attention.dropout import dropout_attention
from parallel.mesh import Axis
from parallel.random import dropout, dropout_mask, fold, sample_keys, token_keys

ONE = Axis("tensor")
POSITIONS = torch.arange(256)


def keys(*samples: int, seed: int = 1234, layer: int = 0) -> torch.Tensor:
    """Keys (tokens) of some samples."""
    _, layers = token_keys(sample_keys(seed, torch.tensor(samples)), POSITIONS, torch.arange(2))
    return layers[layer].flatten()


@pytest.mark.parametrize("rate", [0.05, 0.1, 0.5])
def test_dropout_drops_at_its_rate_and_keeps_the_expectation(rate):
    kept = dropout(torch.ones(1024, 512), keys(0, 1, 2, 3), rate)
    assert kept[kept > 0].unique().tolist() == pytest.approx([1 / (1 - rate)])
    deviation = (rate * (1 - rate)) ** 0.5
    dropped = (kept == 0).double()
    assert abs(dropped.mean() - rate) < 5 * deviation / dropped.numel() ** 0.5
    for dim in (0, 1):  # no row or column is dropped more often than chance
        assert (dropped.mean(dim) - rate).abs().max() < 6 * deviation / dropped.shape[dim] ** 0.5


def test_masks_with_different_keys_are_independent():
    columns = torch.arange(512)
    reference = dropout_mask(keys(0), columns, 0.5).double() - 0.5
    shifted = [reference[1:] * reference[:-1], reference[:, 1:] * reference[:, :-1]]
    others = [keys(1), keys(0, seed=1235), keys(0, layer=1), fold(keys(0), 1)]
    products = shifted + [reference * (dropout_mask(other, columns, 0.5).double() - 0.5) for other in others]
    for product in products:
        assert product.mean().abs() < 5 * 0.25 / product.numel() ** 0.5


def test_keys_are_32_bits_wide_and_distinct_where_all_indices_are_zero():
    """Accelerators have no exact 64-bit products."""
    first = keys(0, seed=0)
    assert first.dtype == torch.int32
    assert len(first.unique()) == len(POSITIONS)
    assert fold(fold(first[:1], 0), 0) not in (0, first[0])
    # Samples are counted modulo 2^32, at any length of a run.
    assert torch.equal(keys(5 + 2**32), keys(5))


def test_gradient_uses_the_forward_mask():
    x = torch.ones(256, 64, requires_grad=True)
    y = dropout(x, keys(0), 0.3)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


@pytest.mark.compiles
def test_compiled_masks_equal_eager_masks():
    x = torch.randn(256, 64)
    compiled = torch.compile(dropout, fullgraph=True)
    assert torch.equal(compiled(x, keys(3), 0.1), dropout(x, keys(3), 0.1))


def test_dropout_attention_equals_attention_on_average():
    q, k, v = torch.randn(3, 1, 4, 16, 8, generator=torch.Generator().manual_seed(0))
    positions, heads = torch.arange(16), torch.arange(4)

    def draw(sample: int) -> torch.Tensor:
        attention_keys, _ = token_keys(sample_keys(0, torch.tensor([sample])), positions, torch.arange(1))
        return dropout_attention(
            q, k, v, ONE, positions=positions, keys=attention_keys, heads=heads, rate=0.3
        )

    draws = torch.stack([draw(sample) for sample in range(100)])
    spread = draws.std(0) / len(draws) ** 0.5
    assert ((draws.mean(0) - attention(q, k, v)).abs() < 6 * spread + 1e-6).all()
    assert spread.max() > 0.01


def test_dropout_attention_masks_documents():
    q, k, v = torch.randn(3, 1, 4, 16, 8, generator=torch.Generator().manual_seed(0))
    documents = (torch.arange(16) >= 6).long()[None]
    options = {"keys": torch.zeros(1, 16, dtype=torch.int32), "heads": torch.arange(4), "rate": 0.0}
    y = dropout_attention(q, k, v, ONE, positions=torch.arange(16), documents=documents, **options)
    torch.testing.assert_close(y, attention(q, k, v, documents=documents))
