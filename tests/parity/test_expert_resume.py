"""Checkpoints of experts divided among ranks, and of their selection bias: resume and export."""

from dataclasses import replace

import torch

from modeling.conversion import formats, huggingface
from parallel.checkpoint.reader import Reader
from tests.parity.harness import Case, assemble, one_process, train

HALF, STEPS = 1, 3  # the last loss depends on an update with restored states
CASE = Case("deepseek_v3", data=2, tensor=2, expert=2, sharding="fsdp", balance="bias")
ELSEWHERE = Case("deepseek_v3", context=2, expert=2, balance="bias")


def test_experts_resume_and_are_exported_on_any_topology(pool, tmp_path):
    saved, last = tmp_path / "half", tmp_path / "last"
    whole, rest = range(STEPS), range(HALF, STEPS)
    first = assemble(pool.run(train, CASE.world, case=CASE, steps=whole, save={HALF: saved, STEPS: last}))
    expected = one_process(CASE.reference, STEPS)
    torch.testing.assert_close(torch.tensor(first.losses), torch.tensor(expected.losses), rtol=1e-5, atol=0)
    same = assemble(pool.run(train, CASE.world, case=CASE, steps=rest, resume=saved))
    assert same.losses == first.losses[HALF:]  # bit for bit
    other = assemble(pool.run(train, ELSEWHERE.world, case=ELSEWHERE, steps=rest, resume=saved))
    torch.testing.assert_close(
        torch.tensor(other.losses), torch.tensor(expected.losses[HALF:]), rtol=1e-5, atol=0
    )

    weights = formats.read(last, None, None, training_dtype=False)
    exported = {
        entry.name: torch.cat([*entry.rows(0, entry.shape[0])]) for entry in huggingface.entries(weights)
    }
    for number in range(CASE.profile().model.num_experts):
        ours = first.weights[f"layers.1.mlp.down.{number}.weight"]
        assert torch.equal(exported[f"model.layers.1.mlp.experts.{number}.down_proj.weight"], ours)
    bias = exported["model.layers.2.mlp.gate.e_score_correction_bias"]
    assert torch.equal(bias, first.weights["layers.2.mlp.router.selection_bias"])
    assert bias.any()


def test_lora_of_experts_is_saved_alone_and_resumes_on_any_topology(pool, tmp_path):
    case, elsewhere = (
        replace(each, lora=("output", "gate_up", "down"), balance="sequence") for each in (CASE, ELSEWHERE)
    )
    whole, rest = range(STEPS), range(HALF, STEPS)
    first = assemble(pool.run(train, case.world, case=case, steps=whole, save={HALF: tmp_path}))
    assert all(".lora." in name or name.startswith("random.") for name in Reader(tmp_path).tensors)
    same = assemble(pool.run(train, case.world, case=case, steps=rest, resume=tmp_path))
    assert same.losses == first.losses[HALF:]  # bit for bit
    other = assemble(pool.run(train, elsewhere.world, case=elsewhere, steps=rest, resume=tmp_path))
    torch.testing.assert_close(
        torch.tensor(other.losses), torch.tensor(first.losses[HALF:]), rtol=1e-5, atol=0
    )
