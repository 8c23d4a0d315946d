"""Activation checkpointing: the same bits with less memory, eager and compiled."""

from functools import cache

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from modeling.models.build import MODELS
from parallel import Mesh, initialize
from parallel.activation_checkpointing import MODES, recompute
from parallel.random import sample_keys
from profiles.model import Model

SIZES = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
DESCRIPTIONS = {
    "llama": Model(**SIZES, num_key_value_heads=2, vocab_size=64, max_position_embeddings=128),
    "gpt": Model(architecture="gpt", **SIZES, vocab_size=64, max_position_embeddings=128, dropout=0.1),
}
TOKENS = torch.arange(129).expand(2, -1) % 61


def build(architecture: str, mode: str, backend: str = "", count: int | None = None):
    model = MODELS[architecture](DESCRIPTIONS[architecture], Mesh())
    initialize(model, Mesh().tensor, 1)
    recompute(model.layers.values(), mode, count)
    if backend:
        for layer in model.layers.values():
            layer.compile(backend=backend, fullgraph=True, dynamic=False)
    return model


def forward(model) -> torch.Tensor:
    keys = sample_keys(1, torch.arange(len(TOKENS)))
    return model.loss(model(TOKENS[:, :-1], torch.arange(128), samples=keys), TOKENS[:, 1:])


@cache
def results(architecture: str, mode: str, backend: str) -> tuple[torch.Tensor, ...]:
    """Loss and gradients."""
    model = build(architecture, mode, backend)
    loss = forward(model)
    loss.backward()
    return loss.detach(), *(parameter.grad for parameter in model.parameters())


# The second divides graphs into forward and backward as a compiler does, without the time that code generation takes.
@pytest.mark.parametrize("backend", ["", "aot_eager_decomp_partition"], ids=["eager", "graphs"])
@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("architecture", DESCRIPTIONS)
def test_same_bits_as_without(architecture, mode, backend):
    again, kept = results(architecture, mode, backend), results(architecture, "none", backend)
    assert all(torch.equal(x, y) for x, y in zip(again, kept, strict=True))


def test_same_bits_where_compiled():
    again, kept = results("llama", "selective", "inductor"), results("llama", "none", "inductor")
    assert all(torch.equal(x, y) for x, y in zip(again, kept, strict=True))


def kept_bytes(model) -> int:
    """Memory that is alive after forward and was not before, the loss's aside."""
    kept = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        kept.append(model(TOKENS[:, :-1], torch.arange(128), samples=sample_keys(1, torch.arange(2))))
    events = record.profiler.kineto_results.events()
    return sum(event.nbytes() for event in events if event.name() == "[memory]")


@pytest.mark.parametrize("architecture", DESCRIPTIONS)
def test_memory_falls_with_each_mode(architecture):
    none, selective, full = (kept_bytes(build(architecture, mode)) for mode in MODES)
    assert full < selective < none
    hidden = 2 * 128 * 64 * 4
    assert full < (3 + 3) * hidden  # an input a block, and what the ends of the model keep
    assert selective < 0.6 * none


def test_by_layer_count():
    one, all_layers = (kept_bytes(build("llama", "full", count=count)) for count in (1, None))
    assert all_layers < one < kept_bytes(build("llama", "none"))


def test_evaluation_keeps_nothing():
    model = build("llama", "selective")
    with torch.no_grad():
        assert torch.equal(forward(model), forward(build("llama", "none")))


def test_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="recompute = 'some' is not one of none, selective, full"):
        recompute([], "some")
