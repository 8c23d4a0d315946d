"""Rules that depend on the model's family: profiles that it does not support are rejected."""

import pytest

from profiles import resolve
from profiles.errors import ProfileError

MODULE = "model.num_nextn_predict_layers=1"


@pytest.mark.parametrize(
    ("profile", "override", "message"),
    [
        ("tiny", ["train.balance=bias"], "balance = bias: has no effect: llama has no experts; nearest valid: sequence"),
        ("tiny-moe", ["train.balance=bias"], "exports of qwen3_moe have no tensor for; nearest valid: sequence, global, none"),
        ("tiny-moe", ["train.balance_bias_rate=0.01"], "has no effect with train.balance sequence; nearest valid: null"),
        ("deepseek-v3", ["parallel.tensor=256"], "tensor = 256: does not divide 128 query heads"),
        ("deepseek-v3", ["train.mtp_weight=0.1"], "mtp_weight = 0.1: has no effect: model.num_nextn_predict_layers is null"),
        ("deepseek-v3", [MODULE], "is not supported with cluster.device neuron; without modules, those of init.from are left"),
        ("deepseek-v3-h200", [MODULE, "train.mtp_later_weight=0.1"], "has no effect: train.mtp_steps, after which it applies"),
        ("deepseek-v3-h200", [MODULE, "train.loss=a:b"], "is not supported with train.loss, as modules have cross-entropy"),
        ("deepseek-v3", ["lora.rank=8"], "no q, k and v projections of hidden states; nearest valid: ['output', "),
        (
            "tiny",
            ["model.architecture=phi3", "lora.rank=8", "lora.targets=[q_proj, down]"],
            "part of a weight that model.architecture phi3 has as one; nearest valid: ['qkv', 'down']",
        ),
        ("tiny-moe", ["lora.rank=8", "lora.targets=[o_proj, up_proj]"], "first factor; nearest valid: ['o_proj', 'gate_up']"),
        ("tiny-moe", ["lora.rank=8", "lora.dropout=0.1"], "lora.dropout = 0.1: is not supported with gate_up of experts"),
    ],
)  # fmt: skip
def test_unsupported_settings_with_experts_are_rejected(profile, override, message):
    with pytest.raises(ProfileError) as caught:
        resolve.check(resolve.load(profile, override))
    assert message in str(caught.value)
