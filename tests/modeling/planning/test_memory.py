"""Memory of a rank beyond parameters, gradients and states."""

import torch

from modeling.planning.memory import PlannedBucket, activation_bytes
from modeling.planning.meter import Meter
from modeling.planning.stage_costs import StageCosts
from parallel.optimizer.adamw import AdamW
from parallel.optimizer.muon import Muon
from profiles import resolve


def test_matrices_of_compiled_muon_are_held_at_the_same_time():
    """More than the exchanged gradients, which are AdamW's peak."""
    profile = resolve.load("llama3-8b")
    bucket = PlannedBucket(8000, True, True, shards=8, replicas=1, experts=False, rule=AdamW())
    adamw, muon = (
        activation_bytes(profile, 0, 1, 0, [bucket._replace(rule=rule, stacked=held)])
        for rule, held in ((AdamW(), 0), (Muon(), 12_000))
    )
    assert muon - adamw == 12_000 - 4 * 1000


def test_gradients_that_backward_holds_are_counted():
    """Of a compiled block's weights, and of a tied head while blocks run; few tokens make them most."""
    layer, small = 1, ("train.sequence_length=64", "model.vocab_size=32000", "train.global_batch_size=8")

    def backward(*overrides: str) -> int:
        costs = StageCosts(resolve.load("llama3-8b-h100", [*small, *overrides]))
        return costs.layer(layer, "none").backward_peak

    compiled, eager = backward(), backward("compile.enabled=false")
    block = StageCosts(resolve.load("llama3-8b-h100", small)).module(range(layer, layer + 1))
    weights = sum(parameter.nbytes for parameter in block.parameters())
    assert eager < 0.6 * weights < weights < compiled
    assert backward("model.tie_word_embeddings=true") - compiled == 2 * 32000 * 4096


def test_results_written_in_place_are_the_tensors_that_were_given():
    """Also where the result of the same operator for tensors of the same shapes is known."""
    for _ in range(2):
        a, b, c = (torch.empty(3, device="meta") for _ in range(3))
        with Meter([a, b, c], {}, None) as meter:
            assert torch.logaddexp(a, b, out=a) is a
            assert torch.logaddexp(a, b, out=c) is c
            assert torch.logaddexp(a, b, out=b) is b
            assert a.add_(a) is a
            assert b.add_(a) is b
        assert meter.live == meter.peak == 0
