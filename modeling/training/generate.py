"""Generated samples for reports, on any topology: validation prompts, continued token by token.

Each new token costs one forward pass of the shape that evaluation uses, so no further graph is compiled. The next token is drawn
from softmax(logits / temperature) over the most likely tokens, with a fixed seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from modeling.data.corpus import Samples
from modeling.data.prefetch import Batch
from modeling.data.records import RecordSamples
from modeling.training.trainer import Trainer
from parallel import collectives
from parallel.attention.zigzag import zigzag_positions
from parallel.device import page_locked, upload
from profiles.schema import Profile

SAMPLES, PROMPT_TOKENS, NEW_TOKENS = 3, 16, 32  # PROMPT_TOKENS: of texts; a record has its own prompt


class Sampling(NamedTuple):
    """How tokens are drawn: temperature, and number of the likeliest tokens; None: all."""

    temperature: float
    top_k: int | None


REPORTED = Sampling(0.8, 40)
FULL = Sampling(1.0, None)  # the model's own distribution


def generate_samples(
    trainer: Trainer, validation: Samples | RecordSamples, after_pass: Callable[[], None] | None = None
) -> list[dict[str, list[int]]]:
    """Continue SAMPLES prompts, evenly spaced over the validation split; token ids. Called on every rank.

    Args:
        after_pass: called after each forward pass, on every rank.
    """
    profile = trainer.profile
    s = profile.train.sequence_length
    reads_records = profile.objective.traits.reads_records
    longest = max(1, s - NEW_TOKENS) if reads_records else min(PROMPT_TOKENS, s // 2)
    rows = rows_of_pass(profile)
    count = min(SAMPLES, rows, validation.windows)
    tokens = torch.zeros(rows, s + 1, dtype=torch.int64)  # (b, s + 1)
    lengths = torch.zeros(count, dtype=torch.int64)  # of the prompts
    for row in range(count):
        prompt = torch.from_numpy(validation.prompt(row * validation.windows // count))[:longest]
        tokens[row, : len(prompt)], lengths[row] = prompt, max(1, len(prompt))
    ends = (lengths + NEW_TOKENS).clamp(max=s)
    every = torch.arange(count)
    for new in range(int((ends - lengths).max())):  # each row at its own position
        positions = (lengths + new).clamp(max=s - 1)
        drawn = next_tokens(trainer, tokens, positions - 1)
        tokens[every, positions] = drawn.where(lengths + new < ends, tokens[every, positions])
        if after_pass is not None:
            after_pass()
    found = zip(tokens[:count], lengths.tolist(), ends.tolist(), strict=True)
    return [{"prompt": row[:start].tolist(), "text": row[start:end].tolist()} for row, start, end in found]


def rows_of_pass(profile: Profile) -> int:
    """Rows of a forward pass: as few microbatches as hold SAMPLES, or all of a step with a pipeline."""
    pipelined = profile.parallel.pipeline > 1
    microbatches = profile.accumulation_steps if pipelined else math.ceil(SAMPLES / profile.micro_batch_rows)
    return profile.micro_batch_rows * microbatches


def sampled_microbatches(profile: Profile) -> int:
    """The first microbatches of a pass, which hold SAMPLES rows; only their hidden states are kept."""
    microbatches = rows_of_pass(profile) // profile.micro_batch_rows
    return min(microbatches, math.ceil(SAMPLES / profile.micro_batch_rows))


def sampled_rows(profile: Profile) -> tuple[int, int]:
    """Rows of a forward pass, and how many of the first ones can be sampled in it."""
    return rows_of_pass(profile), sampled_microbatches(profile) * profile.micro_batch_rows


@torch.no_grad()
def next_tokens(
    trainer: Trainer, tokens: Tensor, positions: Tensor, first: int = 0, sampling: Sampling = REPORTED
) -> Tensor:
    """Draw the token that follows a position (count) in each of the first rows; the same on every rank.

    Args:
        first: number of the first row, which seeds the draws.
    """
    mesh, count = trainer.mesh, len(positions)
    drawn = torch.zeros(count, dtype=torch.float64)
    documents = torch.zeros_like(tokens[:, 1:]) if trainer.profile.document_masks else None
    samples, documents = (
        None if each is None else page_locked(each, trainer.torch_device) for each in (tokens, documents)
    )
    batch = Batch(samples, documents) if trainer.reads_samples else Batch()
    hidden_states = trainer.hidden_states(batch, sampled_microbatches(trainer.profile))
    if trainer.last:
        local = zigzag_positions(tokens.shape[1] - 1, mesh.context.size, mesh.context.rank)
        here = local == positions[:, None]  # (count, s/c): a position is on one context rank
        stage = trainer.stages[max(trainer.stages)]
        head = stage.output_embedding()
        parts = [
            collectives.all_gather(x, mesh.tensor) if stage.sequence_parallel else x for x in hidden_states
        ]
        # Always as many as a pass can sample, so that all counts have one graph; the first ones stand for the rest.
        _, together = sampled_rows(trainer.profile)
        rows = torch.zeros(together, dtype=torch.int64)
        rows[:count] = torch.arange(count) * len(local) + here.int().argmax(1)
        states, soft_cap = upload(rows, trainer.torch_device), stage.model.final_logit_softcapping
        shard = trainer.functions.next_logits(parts, head.weight, states, soft_cap)
        # Transposed on the host: devices copy contiguous memory without a program of their own.
        complete = collectives.all_gather(shard, mesh.tensor).cpu().T
        logits = complete[:count, : stage.model.vocab_size]  # (count, v)
        seeds = (first + torch.arange(count)) * tokens.shape[1] + positions
        # Only of one data rank: the logits of others may differ in the last bits.
        drawn = _draw(logits.float(), seeds, sampling).where(here.any(1) & (mesh.data.rank == 0), 0).double()
    # One context rank of the last stage drew each token.
    return torch.tensor(trainer.sum_on_host(drawn)).round().long()


def _draw(logits: Tensor, seeds: Tensor, sampling: Sampling) -> Tensor:
    """Sample one of each row's likeliest tokens, with a seed (count) each: (count, v) -> (count)."""
    top, ids = logits.topk(min(sampling.top_k or logits.shape[-1], logits.shape[-1]))
    probabilities = torch.softmax(top / sampling.temperature, -1)
    choices = [
        torch.multinomial(row, 1, generator=torch.Generator().manual_seed(seed))
        for row, seed in zip(probabilities, seeds.tolist(), strict=True)
    ]
    return ids.gather(1, torch.stack(choices))[:, 0]
