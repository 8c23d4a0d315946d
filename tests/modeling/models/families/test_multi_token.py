"""Multi-token prediction: losses and gradients as with transformers' modules, also if packed."""

import pytest
import torch
from torch.nn.functional import cross_entropy, pad
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from modeling.conversion.weights import without_modules
from modeling.models.families import model_class
from modeling.training import multi_token
from modeling.training.multi_token import MultiTokenLoss
from modeling.training.outputs import TokenLoss
from modeling.training.step_functions import StepFunctions
from parallel import Mesh, initialize
from parallel.layout import layout_of
from profiles.sections.model import Model
from tests.modeling.models.families.huggingface import (
    TOLERANCE,
    boxes,
    build_pair,
    module_tensors,
    to_our_names,
)
from tests.modeling.models.families.test_families import MIXED, SIZES
from tests.modeling.models.families.test_llama import DEEPSEEK, GLM
from tests.parity.harness import Case

DEPTH, WEIGHT, LENGTH = 2, 0.3, 24
# Qwen's single module has full attention, whatever the pattern; transformers takes its classes from the model's last layer.
QWEN = {
    "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
    "num_mtp_layers": 1, "mtp_layer_types": ["full_attention"],
}  # fmt: skip
KINDS = {
    "deepseek_v3": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config(**{**DEEPSEEK, "num_nextn_predict_layers": DEPTH}),
    ),
    "glm4_moe": (
        Glm4MoeForCausalLM,
        Glm4MoeConfig(
            **{**GLM, "use_qk_norm": True, "attention_bias": True, "num_nextn_predict_layers": DEPTH}
        ),
    ),
    "qwen3_next": (
        Qwen3NextForCausalLM,
        Qwen3NextConfig(**{**SIZES, **MIXED["qwen3_next"][1], **QWEN}, num_nextn_predict_layers=1),
    ),
    "qwen3_5": (
        Qwen3_5ForCausalLM,
        Qwen3_5TextConfig(**{**SIZES, **MIXED["qwen3_5"][0], **QWEN}, num_nextn_predict_layers=1),
    ),
}


def run(model: torch.nn.Module, samples: torch.Tensor, documents: torch.Tensor | None = None) -> torch.Tensor:
    """Forward and backward of samples (b, s + 1); returns the modules' summed losses (D)."""
    positions, targets = torch.arange(samples.shape[1] - 1), samples[:, 1:]
    following, wanted = multi_token.shard(samples, positions, documents, targets, len(model.ahead))
    hidden = model(samples[:, :-1], positions, documents, following=following)
    output = MultiTokenLoss(TokenLoss(StepFunctions()), torch.tensor(WEIGHT, dtype=hidden.dtype))
    (output(model, hidden, wanted) / targets.numel()).backward()
    return output.sums


@pytest.mark.parametrize(("kind", "config"), KINDS.values(), ids=KINDS.keys())
def test_losses_and_gradients_match_transformers(kind, config):
    theirs, ours, description = build_pair(kind, config)
    depth = len(description.prediction_layers)
    samples = torch.randint(0, config.vocab_size, (2, LENGTH + 1))
    sums = run(ours, samples)

    hidden, losses = theirs.model(samples[:, :-1]).last_hidden_state, []
    for distance in range(depth + 1):
        if distance:
            inputs = {"input_ids": pad(samples[:, distance:], (0, distance - 1))}
            hidden = theirs.mtp.forward_layer(
                distance - 1, hidden, torch.arange(LENGTH)[None], None, **inputs
            )
        logits = theirs.lm_head(hidden[:, : LENGTH - distance])
        losses.append(
            cross_entropy(logits.flatten(0, 1), samples[:, distance + 1 :].flatten(), reduction="sum")
        )
    torch.testing.assert_close(sums, torch.stack(losses[1:]), rtol=TOLERANCE, atol=0)
    ((losses[0] + WEIGHT * sum(losses[1:]) / depth) / (2 * LENGTH)).backward()

    gradients = {name: each.grad for name, each in theirs.named_parameters()}
    own = {name: each.grad for name, each in theirs.mtp.named_parameters()}
    gradients |= module_tensors(own, config)
    trained = [(parameter, box) for parameter, box in boxes(ours) if layout_of(parameter).sign_step is None]
    expected = to_our_names(description, [box.name for _, box in trained], gradients)
    for parameter, box in trained:
        difference = (box.view(parameter.grad) - expected[box.name]).norm()
        assert difference <= TOLERANCE * expected[box.name].norm(), f"{box.name}: {difference:.1e}"


def build(description: Model) -> torch.nn.Module:
    model = model_class(description.architecture)(description, Mesh(), dtype=torch.float64)
    initialize(model.named_parameters(), Mesh().tensor, 7)
    return model


def test_model_predicts_the_next_token_as_without_modules():
    description = Case("multi-token").profile().model
    with_modules, without = build(description), build(without_modules(description))
    tokens = torch.randint(0, 100, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    hidden = [model(tokens, torch.arange(LENGTH)) for model in (with_modules, without)]
    assert torch.equal(*hidden)
    following = torch.zeros(2, DEPTH, LENGTH, dtype=torch.int64)
    assert torch.equal(with_modules(tokens, torch.arange(LENGTH), following=following).chunk(3)[0], hidden[0])


def test_modules_predict_within_documents_as_if_these_were_alone():
    model = build(Case("multi-token").profile().model)
    tokens = torch.randint(0, 100, (1, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    cuts = [0, 5, 6, 8, 19]
    starts = torch.tensor([[max(cut for cut in cuts if cut <= i) for i in range(LENGTH)]])
    packed = run(model, tokens, starts)
    documents = [tokens[:, start:end] for start, end in zip(cuts, [*cuts[1:], LENGTH + 1], strict=True)]
    alone = sum(run(model, document) for document in documents if document.shape[1] > 1)
    torch.testing.assert_close(packed, alone, rtol=1e-12, atol=0)
