"""A run with multi-token prediction on two pipeline stages: losses by depth, and evaluation."""

import pytest

from modeling.training.multi_token import weight
from profiles.schema import Train
from tests.modeling import micro

MODEL = {
    "architecture": "deepseek_v3",
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "num_nextn_predict_layers": 2,
}


@pytest.mark.slow
def test_losses_by_depth_are_recorded_and_evaluations_have_them_on_request(tmp_path):
    settings = ("parallel.tensor=1", "parallel.pipeline=2", "train.balance=none", "evaluate.mtp=true")
    run = micro.run_folder(
        tmp_path / "run", *settings, *(f"model.{name}={value}" for name, value in MODEL.items())
    )
    micro.run("training.train", "--run-folder", run, "--dataset", micro.dataset(tmp_path))
    steps = [row for row in micro.metrics(run) if "loss" in row]
    first, last = (steps[place]["mtp_loss_by_depth"] for place in (0, -1))
    evaluation = [row for row in micro.metrics(run) if "validation_loss" in row][-1]
    assert abs(evaluation["validation_loss"] - steps[-1]["loss"]) < 0.5
    for distance, (before, after) in enumerate(zip(first, last, strict=True), 1):
        assert after < before - 0.1
        assert abs(evaluation[f"mtp_loss_{distance}"] - after) < 0.5


def test_weight_changes_once():
    settings = Train.model_validate(
        {
            "global_batch_size": 1,
            "sequence_length": 8,
            "learning_rate": 1.0,
            "mtp_steps": 2,
            "mtp_later_weight": 0.1,
        }
    )
    assert [weight(settings, step) for step in (1, 2, 3)] == [0.3, 0.3, 0.1]
