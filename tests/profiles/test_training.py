"""Shipped profiles really train, all that differ at small size, with the losses of one process.

Each keeps its kind of network, recomputation and schedule, with degrees in proportion on up to 8 processes.
"""

import math

import pytest
import torch

from modeling.data.prefetch import Batch
from modeling.training.learning_rate import learning_rate
from modeling.training.train import make_optimizer
from modeling.training.trainer import Trainer
from profiles import resolve
from profiles.recompute import MODES, modes_of
from profiles.schema import Profile
from tests.profiles.published import NAMES, published

pytestmark = pytest.mark.slow

STEPS, SEQUENCE, VOCABULARY = 3, 32, 301  # a vocabulary that no degree divides, as GPT-2's
TOLERANCE = 1e-5
# Degrees in proportion: 32 tensor ranks over 8 KV heads are 4 over 2, and 8 ranks are 2.
TENSOR = {32: 4, 16: 4, 8: 2, 4: 2, 2: 2, 1: 1}
# The published topologies, and of the sharded ones, which differ by degrees that are small here anyway, one a family.
SHARDED = (
    "llama2-7b",
    "llama3-70b",
    "gpt3-23b",
    "deepseek-coder-33b",
    "mistral-7b",
    "qwen3-8b",
    "olmo2-7b",
    "qwen3-30b-a3b",
    "gpt-oss-20b",
)
# Published ones that at this size are another one, but for RoPE or the mode of recomputation, which others vary, too.
ALIKE = {
    "deepseek-coder-1.3b": "deepseek-coder-6.7b",
    "llama2-70b": "llama3-70b",
    "llama3-8b": "llama3.1-8b",
    "gpt3-46b": "gpt3-23b",
}
PROFILES = {name: name for name in SHARDED} | {
    name: published(name) for name in NAMES if name.removesuffix("-trn1") not in ALIKE
}


def small(name: str) -> Profile:
    """A profile whose numbers are smaller, with all else as shipped."""
    full = resolve.load(name)
    model, parallel = full.model, full.parallel
    pipeline, context = min(2, parallel.pipeline), parallel.context
    tensor = TENSOR[parallel.tensor] // context
    data = 2 if full.data_parallel > 1 and tensor * pipeline * context <= 4 else 1
    groups = model.num_attention_heads // model.num_key_value_heads
    kv_heads = max(1, tensor // full.kv_replication)
    heads = kv_heads * min(groups, 4) if groups > 1 else tensor * 2
    overrides = {
        "model.hidden_size": 8 * heads,
        "model.intermediate_size": 32 * tensor,
        "model.num_hidden_layers": 4 if parallel.schedule == "interleaved" else 2,
        "model.num_attention_heads": heads,
        "model.num_key_value_heads": heads if groups == 1 else kv_heads,
        "model.head_dim": "null",
        "model.vocab_size": VOCABULARY,
        "tokenizer.vocabulary_size": "null",
        "objective.maximum_prompt_length": "null",
        "model.max_position_embeddings": 2 * SEQUENCE,
        "model.initializer_range": 0.1,  # so that three steps make a difference
        "parallel.tensor": tensor,
        "parallel.shard_degree": "null",
        "parallel.pipeline_cuts": "null",
        "train.recompute": max(modes_of(full.train.recompute), key=MODES.index),
        "parallel.pipeline": pipeline,
        "train.steps": STEPS,
        "train.warmup_steps": 1,
        "train.constant_steps": min(1, full.train.constant_steps),
        "train.minimum_rate_steps": min(1, full.train.minimum_rate_steps),
        "train.learning_rate": 3e-3,
        "train.minimum_learning_rate": 0.0,
        "train.global_batch_size": 4,
        "train.sequence_length": SEQUENCE,
        "train.precision": "float32",
        "compile.enabled": "false",
        "cluster.launcher": "local",
        "cluster.nodes": 1,
        "cluster.devices_per_node": tensor * pipeline * context * data,
        "cluster.device": "cpu",
        "cluster.accelerator": "null",
        "cluster.threads": 1,
    }
    if model.num_experts:
        overrides |= {"model.num_experts": 4, "model.num_experts_per_tok": 2}
        overrides |= {"parallel.expert": data if parallel.expert > 1 else 1}
    if model.moe_intermediate_size:
        overrides["model.moe_intermediate_size"] = 16 * tensor
    if model.sliding_window:
        overrides["model.sliding_window"] = SEQUENCE // 2
    if model.rope_scaling is not None and model.rope_scaling.rope_type == "llama3":
        overrides["model.rope_scaling.original_max_position_embeddings"] = SEQUENCE // 2
    profile = resolve.load(name, [f"{key}={value}" for key, value in overrides.items()])
    resolve.check(profile)
    return profile


def alone(profile: Profile) -> Profile:
    """The same mathematics in one process."""
    one = {"tensor": 1, "pipeline": 1, "context": 1, "expert": 1}
    return profile.model_copy(
        update={
            "parallel": profile.parallel.model_copy(update=one),
            "train": profile.train.model_copy(update={"recompute": "none"}),
            "cluster": profile.cluster.model_copy(update={"devices_per_node": 1}),
        }
    )


def losses(profile: Profile) -> list[float]:
    """Of some steps on this rank's share of one batch, again and again."""
    trainer = Trainer(profile)
    try:
        optimizer = make_optimizer(trainer)
        train, found = profile.train, []
        own = train.global_batch_size // trainer.mesh.data.size
        first = trainer.mesh.data.rank * own
        for step in range(1, STEPS + 1):
            generator, rows = torch.Generator().manual_seed(0), profile.rows_per_sample
            size = (train.global_batch_size * rows, train.sequence_length + 1)
            samples = torch.randint(VOCABULARY, size, generator=generator)
            samples = samples[first * rows : (first + own) * rows]
            optimizer.begin_step(profile.accumulation_steps)
            scale = 1 / (train.global_batch_size * (train.sequence_length if rows == 1 else 1))
            documents = reference = None
            if profile.objective.kind != "pretrain":
                samples[:, :8] = ~samples[:, :8]  # a prompt
                documents = torch.zeros_like(samples[:, 1:]) if profile.document_masks else None
                reference = torch.zeros(len(samples)) if profile.objective.kind == "dpo" else None
            tokens = samples if trainer.reads_samples else None
            loss = trainer.forward_backward(
                Batch(tokens, documents, reference=reference),
                scale,
                (step - 1) * train.global_batch_size + first,
                pairs_per_token=1 / train.sequence_length,
            )
            optimizer.step(learning_rate(train, step))
            found.append(trainer.sum(loss[None]).item())
        return found
    finally:
        trainer.mesh.close()


@pytest.mark.parametrize("name", PROFILES.values(), ids=PROFILES)
def test_profile_trains_like_one_process(pool, name):
    profile = small(name)
    assert profile.model.architecture == resolve.load(name).model.architecture
    spread = pool.run(losses, profile.world_size, profile=profile)[0]
    expected = losses(alone(profile))
    assert spread[-1] < spread[0] - 0.01
    assert all(math.isclose(a, b, rel_tol=TOLERANCE) for a, b in zip(spread, expected, strict=True)), (
        spread,
        expected,
    )
