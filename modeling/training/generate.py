"""Generated samples for reports, on any topology: validation prompts, continued token by token.

Each token costs one forward pass of the shape that evaluation uses, so no further graph is compiled. The next token is drawn
from softmax(logits / TEMPERATURE) over the TOP_K most likely tokens, with a fixed seed.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from modeling.data.corpus import Samples
from modeling.data.prefetch import Batch
from modeling.data.records import RecordSamples
from modeling.training.trainer import Trainer
from parallel import collectives
from parallel.attention.ring import zigzag_positions
from parallel.device import page_locked, upload
from profiles.schema import Profile

SAMPLES, PROMPT_TOKENS, NEW_TOKENS = 3, 16, 32  # PROMPT_TOKENS: of texts; a record has its own prompt
TEMPERATURE, TOP_K = 0.8, 40


def generate_samples(trainer: Trainer, validation: Samples | RecordSamples) -> list[dict[str, list[int]]]:
    """Continue SAMPLES prompts, evenly spaced over the validation split; token ids. Called on every rank."""
    profile = trainer.profile
    s = profile.train.sequence_length
    longest = min(PROMPT_TOKENS, s // 2) if profile.objective.kind == "pretrain" else max(1, s - NEW_TOKENS)
    rows = rows_of_pass(profile)
    count = min(SAMPLES, rows, validation.windows)
    tokens = torch.zeros(rows, s + 1, dtype=torch.int64)  # (b, s + 1)
    lengths = torch.zeros(count, dtype=torch.int64)  # of the prompts
    for row in range(count):
        prompt = torch.from_numpy(validation.prompt(row * validation.windows // count))[:longest]
        tokens[row, : len(prompt)], lengths[row] = prompt, max(1, len(prompt))
    ends = (lengths + NEW_TOKENS).clamp(max=s)
    for position in range(int(lengths.min()), int(ends.max())):
        drawn = _next_tokens(trainer, tokens, position - 1, count)
        tokens[:count, position] = drawn.where(position >= lengths, tokens[:count, position])
    rows = zip(tokens[:count], lengths.tolist(), ends.tolist(), strict=True)
    return [{"prompt": row[:start].tolist(), "text": row[start:end].tolist()} for row, start, end in rows]


def rows_of_pass(profile: Profile) -> int:
    """Rows of a forward pass: as few microbatches as hold SAMPLES, or all of a step with a pipeline."""
    pipelined = profile.parallel.pipeline > 1
    microbatches = profile.accumulation_steps if pipelined else math.ceil(SAMPLES / profile.micro_batch_rows)
    return profile.micro_batch_rows * microbatches


@torch.no_grad()
def _next_tokens(trainer: Trainer, tokens: Tensor, position: int, count: int) -> Tensor:
    """Draw the tokens (count) that follow `position` in the first rows; the same on every rank."""
    mesh = trainer.mesh
    drawn = torch.zeros(count, dtype=torch.float64)
    documents = torch.zeros_like(tokens[:, 1:]) if trainer.profile.document_masks else None
    samples, documents = (
        None if each is None else page_locked(each, trainer.torch_device) for each in (tokens, documents)
    )
    batch = Batch(samples, documents) if trainer.reads_samples else Batch()
    hidden_states = trainer.hidden_states(batch)
    positions = zigzag_positions(tokens.shape[1] - 1, mesh.context.size, mesh.context.rank).tolist()
    local = positions.index(position) if position in positions else None  # on one context rank
    if trainer.last:
        stage = trainer.stages[max(trainer.stages)]
        head = stage.output_embedding()
        parts = [
            collectives.all_gather(x, mesh.tensor) if stage.sequence_parallel else x for x in hidden_states
        ]
        index = upload(torch.tensor(local or 0), trainer.torch_device)
        shape = count, len(trainer.positions)
        shard = trainer.functions.next_logits(parts, head.weight, shape, index)  # (v/t, count)
        logits = collectives.all_gather(shard, mesh.tensor).T[:, : stage.model.vocab_size]  # (count, v)
        if local is not None:
            drawn = _draw(logits.cpu().float(), position).double()
    # Every data rank drew the same tokens; along the other axes only one context rank of the last stage drew any.
    return torch.tensor(trainer.sum_on_host(drawn)).div(mesh.data.size).round().long()


def _draw(logits: Tensor, seed: int) -> Tensor:
    """Sample one of the TOP_K most likely tokens of each row: (count, v) -> (count)."""
    top, ids = logits.topk(min(TOP_K, logits.shape[-1]))
    probabilities = torch.softmax(top / TEMPERATURE, -1)
    choice = torch.multinomial(probabilities, 1, generator=torch.Generator().manual_seed(seed))
    return ids.gather(1, choice)[:, 0]
