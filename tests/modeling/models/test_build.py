"""Models built from profiles."""

import torch

from modeling.models.build import build_expert_options, build_mesh, build_model, rule_of
from parallel.layout import layout_of
from parallel.optimizer.muon import Muon
from profiles import resolve
from tests.parity.harness import Case


def test_balance_losses_of_pairs_are_averaged_over_the_rows_of_a_step():
    """Each row, of which a pair has two, adds its loss."""
    pretraining = resolve.load("tiny-moe")
    pairs = resolve.load("tiny-moe", ["objective.kind=dpo"])
    batch = pretraining.train.global_batch_size
    assert build_expert_options(pretraining).balance.samples == batch
    assert build_expert_options(pairs).balance.samples == 2 * batch


def updated_by_muon(case: Case) -> set[str]:
    """Names of the last layer's parameters, and of all outside of layers, that Muon updates."""
    profile = case.profile()
    last = profile.model.num_hidden_layers
    model = build_model(profile, build_mesh(profile), range(last), torch.device("meta"))
    rule, block = rule_of(profile), f"layers.{last - 1}."
    found = {name for name, parameter in model.named_parameters() if isinstance(rule(name, parameter), Muon)}
    return {name.removeprefix(block) for name in found if name.startswith(block) or "layers." not in name}


def test_muon_updates_the_matrices_of_blocks_only():
    attention = {
        "attention.latents.weight",
        "attention.q.weight",
        "attention.kv.weight",
        "attention.output.weight",
    }
    experts = {"mlp.gate_up.weight", "mlp.down.weight", "shared.gate_up.weight", "shared.down.weight"}
    assert updated_by_muon(Case("deepseek_v3", optimizer="muon")) == attention | experts
    block = {"attention.qkv.weight", "attention.output.weight", "mlp.up.weight", "mlp.down.weight"}
    assert updated_by_muon(Case("gpt", optimizer="muon")) == block
    assert updated_by_muon(Case("gpt")) == set()
    chosen = resolve.load("tiny", ["train.optimizer=muon", "train.muon_coefficients=polar_express"])
    matrix = torch.nn.Parameter(torch.zeros(2, 2))
    assert rule_of(chosen)("layers.0.mlp.up.weight", matrix).coefficients == "polar_express"


def test_projections_to_heads_are_cut_into_the_rows_of_each():
    for name, heads in (("deepseek_v3", {"q", "kv"}), ("gpt", {"qkv"})):
        profile = Case(name, optimizer="muon", muon_heads=True).profile()
        model, settings = (
            build_model(profile, build_mesh(profile), range(1), torch.device("meta")),
            profile.model,
        )
        rows = {"kv": (settings.qk_nope_head_dim, settings.v_head_dim)}
        expected = {
            f"layers.0.attention.{each}.weight": rows.get(each, (settings.head_dim,)) for each in heads
        }
        layouts = {each: layout_of(parameter) for each, parameter in model.named_parameters()}
        assert {each: found.head_rows for each, found in layouts.items() if found.head_rows} == expected
    # Matrices with and without heads may share a bucket.
    assert len({rule_of(profile)(*named) for named in model.named_parameters()}) == 2  # with AdamW
