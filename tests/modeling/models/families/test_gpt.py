"""GPT against transformers' GPT2LMHeadModel, and its dropout."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from modeling.models.families.gpt import GPT
from parallel import Mesh, initialize
from parallel.random import sample_keys
from profiles.sections.model import Model
from tests.modeling.models.families.huggingface import assert_match

CASES = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "exact gelu": {"activation_function": "gelu"},
    "narrow mlp": {"n_inner": 96},
}


@pytest.mark.parametrize("fields", CASES.values(), ids=CASES.keys())
def test_logits_loss_and_gradients_match_transformers(fields):
    sizes = {
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 32,
        "vocab_size": 101,
        "bos_token_id": 0,
        "initializer_range": 0.1,
    }
    off = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0)
    assert_match(GPT2LMHeadModel, GPT2Config(**{**sizes, "eos_token_id": 0, **off, **fields}))


@pytest.fixture(scope="module", params=["dropout", "mlp_dropout"])
def model(request) -> GPT:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    rates = {request.param: 0.3, "initializer_range": 0.1}
    description = Model(architecture="gpt", **sizes, vocab_size=101, max_position_embeddings=32, **rates)
    model = GPT(description, Mesh())
    initialize(model.named_parameters(), Mesh().tensor, 1)
    return model


def hidden(model: GPT, samples: list[int] | None) -> torch.Tensor:
    """Hidden states (b, s, h) of one text under each of these sample numbers."""
    tokens = torch.arange(24).expand(len(samples or [0]), 24)
    keys = None if samples is None else sample_keys(1234, torch.tensor(samples))
    return model(tokens, torch.arange(24), sample_keys=keys).view(*tokens.shape, -1)


def test_dropout_depends_only_on_the_sample_number(model):
    both = hidden(model, [5, 6])
    torch.testing.assert_close(hidden(model, [6, 9])[0], both[1])
    assert (both[0] - both[1]).abs().max() > 0.1


def test_no_dropout_without_sample_keys(model):
    torch.testing.assert_close(hidden(model, None), hidden(model, None), rtol=0, atol=0)
    assert (hidden(model, None)[0] - hidden(model, [5])[0]).abs().max() > 0.1
