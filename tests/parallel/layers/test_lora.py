"""LoRA dropout: applied to the update's input alone, scaled, and only in training."""

import torch
from torch import nn

from parallel import Mesh
from parallel.layers.lora import LowRankUpdate
from parallel.random import local_keys, sample_keys, token_keys


def test_dropout_zeroes_a_share_of_the_inputs_and_scales_the_others():
    update = LowRankUpdate(nn.Identity(), nn.Identity(), 2.0, rate=0.25, site=4)
    tokens, _ = token_keys(sample_keys(1, torch.arange(4)), torch.arange(100), torch.arange(1))
    keys = local_keys(tokens, Mesh().tensor, False)
    x = torch.ones(400, 50)
    y = update(x, keys)
    assert set(y.unique().tolist()) == {0.0, torch.tensor(2 / 0.75).item()}
    assert 0.23 < (y == 0).float().mean() < 0.27
    assert not torch.equal(y, LowRankUpdate(nn.Identity(), nn.Identity(), 2.0, 0.25, site=5)(x, keys))
    # If features are split, each rank drops what one process drops of its features.
    half = LowRankUpdate(nn.Identity(), nn.Identity(), 2.0, 0.25, 4, columns=torch.arange(25, 50))
    torch.testing.assert_close(half(x[:, 25:], keys), y[:, 25:])
    assert torch.equal(update(x), 2 * x)
