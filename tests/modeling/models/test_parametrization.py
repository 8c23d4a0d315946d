"""Parametrization: each group's initial weights, rates and decay; best rate independent of width."""

import pytest
import torch
from pydantic import ValidationError

from modeling.data.prefetch import Batch
from modeling.models.build import build_optimizer
from modeling.training.train import make_optimizer
from modeling.training.trainer import Trainer
from profiles.check import with_value
from profiles.schema import Profile
from profiles.sections.model import Model

VOCABULARY, BATCH, SEQUENCE = 64, 16, 16
STEPS = 60
BASE, WIDE = 16, 128


def profile(width: int, rate: float = 1e-2, layers: int = 2, decay: float = 0.0, **model: object) -> Profile:
    sizes = {
        "hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers, "num_attention_heads": width // 8,
        "vocab_size": VOCABULARY, "max_position_embeddings": SEQUENCE, "initializer_range": 0.05,
    }  # fmt: skip
    train = {
        "steps": STEPS, "warmup_steps": 2, "global_batch_size": BATCH, "micro_batch_size": BATCH, "learning_rate": rate,
        "sequence_length": SEQUENCE, "precision": "float32", "weight_decay": decay, "clip": None,
    }  # fmt: skip
    return Profile.model_validate(
        {
            "name": "width", "model": {**sizes, **model}, "train": train, "tokenizer": {"source": "train"},
            "data": {"sources": [{"kind": "python-docs"}]}, "cluster": {"device": "cpu", "threads": 1},
        }
    )  # fmt: skip


def test_scale_rate_and_decay_of_every_group():
    """A model 4x as wide and 3x as deep as its base; the first Adam step moves a weight by its rate."""
    base = {"parametrization": "completep", "base_hidden_size": 32, "base_num_hidden_layers": 2}
    m, depth, rate, decay = 4, 3, 1e-3, 0.1
    run = profile(128, rate, layers=6, decay=decay, tie_word_embeddings=True, **base)
    with Trainer(run) as trainer:
        optimizer = build_optimizer(run, [*trainer.stages.values()], trainer.mesh)
        before = {name: weight.detach().clone() for name, weight in trainer.stages[0].named_parameters()}
        for weight in (weight for _, weight in trainer.stages[0].named_parameters()):
            (weight.sum()).backward()
        optimizer.step(rate)
        after = dict(trainer.stages[0].named_parameters())
        optimizer.gather_parameters()
    expected = {  # standard deviation, factor of the rate
        "embedding.weight": (0.05, 1),
        "layers.5.attention.qkv.weight": (0.05 / m**0.5, 1 / m),
        "layers.5.mlp.gate_up.weight": (0.05 / m**0.5, 1 / m),
        "layers.5.attention.output.weight": (0.05 / m**0.5 / depth, 1 / m / depth),
        "layers.5.mlp.down.weight": (0.05 / m**0.5 / depth, 1 / m / depth),
        "layers.5.mlp_norm.weight": (None, 1),
        "norm.weight": (None, 1 / m),
    }
    assert "head.weight" not in before
    for name, (std, factor) in expected.items():
        moved = before[name] - after[name].detach()
        shrunk = 0.0 if std is None else rate * decay * before[name]  # per step, the same for every group
        torch.testing.assert_close(
            moved, torch.full_like(moved, rate * factor) + shrunk, rtol=1e-2, atol=1e-7
        )
        if std is not None:
            assert before[name].std().item() == pytest.approx(std, rel=0.03), name
    assert torch.equal(before["norm.weight"], torch.full((128,), 1 / m))


def test_rates_of_muon_follow_the_root_of_the_width():
    base = {"parametrization": "completep", "base_hidden_size": 32, "base_num_hidden_layers": 2}
    m, depth, decay = 4, 3, 0.1
    adamw = profile(128, 1e-3, layers=6, decay=decay, tie_word_embeddings=True, **base)
    run = with_value(adamw, "train.optimizer", "muon")
    with Trainer(run) as trainer:
        optimizer = build_optimizer(run, [*trainer.stages.values()], trainer.mesh)
        buckets = {slot.name: bucket for bucket in optimizer.buckets for slot in bucket.slots}
    expected = {
        "embedding.weight": 1,
        "layers.5.attention.qkv.weight": 1 / m**0.5,
        "layers.5.mlp.down.weight": 1 / m**0.5 / depth,
        "norm.weight": 1 / m,
    }
    for name, rate in expected.items():
        assert buckets[name].rate == pytest.approx(rate)
        if name != "norm.weight":
            assert buckets[name].rate * buckets[name].weight_decay == pytest.approx(decay)


def test_base_sizes_are_required_with_a_parametrization_and_invalid_without():
    sizes = profile(32).model.model_dump(
        exclude={"parametrization", "base_hidden_size", "base_num_hidden_layers"}
    )
    for given, key in (
        ({"parametrization": "mup"}, "base_hidden_size"),
        ({"parametrization": "completep", "base_hidden_size": 32}, "base_num_hidden_layers"),
        ({"base_hidden_size": 32}, "base_hidden_size"),
        ({"parametrization": "mup", "base_hidden_size": 32, "attention_bias": True}, "attention_bias"),
        ({"parametrization": "mup", "base_hidden_size": 32, "architecture": "olmo2"}, "parametrization"),
    ):
        with pytest.raises(ValidationError, match=f" {key}"):
            Model.model_validate({**sizes, **given})


def batch(step: int) -> torch.Tensor:
    """Sequences in which a token is mostly a fixed function of the previous one."""
    order = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
    for i in range(1, SEQUENCE + 1):
        follows = torch.rand(BATCH, generator=generator) < 0.85
        tokens[:, i] = torch.where(follows, order[tokens[:, i - 1]], tokens[:, i])
    return tokens


def final_loss(run: Profile) -> float:
    """Mean training loss of the last steps."""
    losses = []
    with Trainer(run) as trainer:
        optimizer = make_optimizer(trainer)
        for step in range(1, STEPS + 1):
            optimizer.begin_step(1)
            losses.append(trainer.forward_backward(Batch(batch(step)), 1 / (BATCH * SEQUENCE)).item())
            optimizer.step(run.train.learning_rate)
    return sum(losses[-8:]) / 8


def best_rate(width: int, exponents: range, **model: object) -> int:
    """Exponent of the best rate among powers of two."""
    return min(exponents, key=lambda e: final_loss(profile(width, 2.0**e, **model)))


@pytest.mark.slow
def test_best_rate_is_the_same_at_eight_times_the_width():
    base = best_rate(BASE, range(-8, -5))
    mup = {"parametrization": "mup", "base_hidden_size": BASE}
    assert base == -7
    assert abs(best_rate(WIDE, range(-9, -5), **mup) - base) <= 1
    assert best_rate(WIDE, range(-9, -6)) <= base - 2  # standard: at most a quarter
