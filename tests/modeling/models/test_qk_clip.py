"""QK-clip: logits of the same batch are at the threshold after a step that changes nothing else."""

import gc
from dataclasses import replace
from weakref import ref

import pytest
import torch

from modeling.data.prefetch import Batch
from modeling.models import qk_clip as rule
from modeling.planning.meter import Meter
from modeling.training.step import take_logit_clip
from modeling.training.train import make_optimizer
from modeling.training.trainer import Trainer
from parallel import device as devices
from parallel.attention.maxima import max_scores
from parallel.mesh import Axis
from tests.parity.harness import BATCH, SEQUENCE, Case, batch

THRESHOLD = 0.6


def logits_of(trainer: Trainer, optimizer):
    """Run forward and backward; what was recorded."""
    optimizer.begin_step(trainer.profile.accumulation_steps)
    trainer.forward_backward(Batch(batch(0)), 1 / (BATCH * SEQUENCE))
    return take_logit_clip(trainer)


@pytest.mark.parametrize("name", ["llama tied", "deepseek_v3", "in graphs"])
def test_a_trainer_and_its_optimizer_are_freed(name, monkeypatch):
    """Although hooks of their parameters call them."""
    case = Case(name, qk_clip=THRESHOLD)
    if name == "in graphs":
        case = Case("llama tied", qk_clip=THRESHOLD, sharding="fsdp", eager=False)
        monkeypatch.setitem(devices.KINDS, "cpu", replace(devices.CPU, gathers_in_graph=True))

    def train():
        with Trainer(case.profile()) as trainer:
            optimizer = make_optimizer(trainer)
            logits_of(trainer, optimizer)
        return [ref(held) for held in (trainer.stages[0], optimizer, *optimizer.buckets)]

    references = train()
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)


@pytest.mark.parametrize("name", ["llama tied", "gpt", "deepseek_v3", "multi-token"])
def test_logits_are_scaled_to_the_threshold_by_queries_and_keys_only(name):
    with Trainer(Case(name, qk_clip=THRESHOLD).profile()) as trainer:
        optimizer = make_optimizer(trainer)
        weights = dict(trainer.stages[0].named_parameters())
        with torch.no_grad():
            for parameter in (weight for name, weight in weights.items() if name.endswith("qkv.bias")):
                parameter.normal_(std=0.5)
        before = {name: weight.detach().clone() for name, weight in weights.items()}
        found = logits_of(trainer, optimizer)
        with pytest.raises(ValueError, match="row_factors are given exactly if"):
            optimizer.step(0.0)
        skipped = optimizer.step(0.0, torch.ones(()), found.row_factors).skipped
        assert (skipped, found.logits.min() > -torch.inf) == (1, True)
        assert all(torch.equal(weights[name], value) for name, value in before.items())  # a skipped step
        found = logits_of(trainer, optimizer)
        optimizer.step(0.0, row_factors=found.row_factors)
        assert found.results[1] == (found.logits > THRESHOLD).sum() > 0
        model, after = trainer.profile.model, logits_of(trainer, optimizer).logits
        groups = model.num_key_value_heads
        largest = found.logits.unflatten(1, (groups, -1)).amax(-1)  # of the heads that share a key
        scale = (THRESHOLD / largest).clamp(max=1).repeat_interleave(model.num_attention_heads // groups, 1)
        # Only the first layer's inputs are as before.
        torch.testing.assert_close(after[0], (found.logits * scale)[0], rtol=1e-5, atol=1e-6)
        assert (after[0] <= THRESHOLD * (1 + 1e-5)).all()
        assert scale[0].min() < 1
        for changed, value in before.items():
            same = weights[changed] == value
            if (indices := kept_rows(model, changed)) is not None:
                assert same[indices].all()
                assert not same.all()
            else:
                assert same.all(), changed


def kept_rows(model, name):
    """Rows of a parameter that are not scaled; None for parameters of which none is."""
    if "attention.qkv" in name:
        return slice((model.num_attention_heads + model.num_key_value_heads) * model.head_dim, None)
    if (indices := rule.row_factors(model, name)) is None:
        return None
    return indices == 0


def test_plans_count_the_keys_of_all_context_ranks():
    q, k = (torch.empty(1, heads, 64, 16, device="meta") for heads in (4, 2))
    peaks = []
    for ranks in (1, 4):
        with Meter([q, k], {"context": ranks}, None) as meter:
            max_scores(q, k, Axis("context", ranks))
        peaks.append(meter.peak)
    assert peaks[1] - peaks[0] == 4 * k.nbytes
