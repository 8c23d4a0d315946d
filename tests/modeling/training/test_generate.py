"""Generated samples: of the likeliest tokens they equal transformers' greedy `generate`."""

from functools import partial

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from modeling.models.families import huggingface_tensor
from modeling.training import generate
from modeling.training.trainer import Trainer
from parallel import initialize
from profiles.huggingface.config import to_config_json
from tests.modeling.models.families.huggingface import as_stored, boxes
from tests.parity.harness import Case, batch


class Prompts:
    """Stands in for the validation split."""

    windows = 3

    @staticmethod
    def prompt(sample):
        return batch(0)[sample].numpy()


@pytest.mark.parametrize("family", ["mistral", "mixtral", "dbrx", "gpt_oss", "deepseek_v3"])
def test_greedy_samples_equal_transformers(monkeypatch, family):
    greedy = partial(generate.next_tokens, sampling=generate.Sampling(1.0, 1))
    monkeypatch.setattr(generate, "next_tokens", greedy)
    trainer = Trainer(Case(family).profile())
    initialize(trainer.stages[0].named_parameters(), trainer.mesh.tensor, 0)
    try:
        samples = generate.generate_samples(trainer, Prompts)
    finally:
        trainer.mesh.close()
    (stage,) = trainer.stages.values()
    fields = to_config_json(stage.model)
    config = AutoConfig.for_model(**fields, eos_token_id=None, bos_token_id=None, pad_token_id=0)
    theirs = AutoModelForCausalLM.from_config(config).eval()
    weights = as_stored(family, theirs.state_dict())
    for parameter, box in boxes(stage):
        where = huggingface_tensor(stage.model, box.name)
        where.read(weights[where.name]).copy_(box.view(parameter.detach()))
    prompts = torch.tensor([sample["prompt"] for sample in samples])
    new = len(samples[0]["text"])
    options = {"attention_mask": torch.ones_like(prompts), "max_new_tokens": new, "do_sample": False}
    expected = theirs.generate(prompts, **options)[:, prompts.shape[1] :]
    assert expected.shape == (3, 16)
    assert [sample["text"] for sample in samples] == expected.tolist()


def test_samples_of_preference_runs_continue_the_prompts_of_records():
    trainer = Trainer(Case(objective="dpo").profile())
    initialize(trainer.stages[0].named_parameters(), trainer.mesh.tensor, 0)
    passes = []
    try:
        samples = generate.generate_samples(trainer, Prompts, lambda: passes.append(None))
    finally:
        trainer.mesh.close()
    assert [sample["prompt"] for sample in samples] == batch(0)[:3, :1].tolist()
    assert [len(sample["text"]) for sample in samples] == [31, 31, 31]
    assert len(passes) == 31


def test_passes_of_all_microbatches_of_a_step_keep_only_the_sampled_ones(monkeypatch):
    """As on a pipeline; the samples are those of passes without the other microbatches."""
    pipelined = Case(pipeline=2).profile()
    assert generate.rows_of_pass(pipelined) == 4 * pipelined.micro_batch_rows
    assert generate.sampled_microbatches(pipelined) == 2
    trainer = Trainer(Case(microbatches=4).profile())
    initialize(trainer.stages[0].named_parameters(), trainer.mesh.tensor, 0)
    next_logits, kept = trainer.functions.next_logits, []

    def spy(hidden, *arguments):
        kept.append(len(hidden))
        return next_logits(hidden, *arguments)

    monkeypatch.setattr(trainer.functions, "next_logits", spy)
    try:
        expected = generate.generate_samples(trainer, Prompts)
        monkeypatch.setattr(generate, "rows_of_pass", lambda profile: 8)
        samples = generate.generate_samples(trainer, Prompts)
    finally:
        trainer.mesh.close()
    assert samples == expected
    assert set(kept) == {2}
