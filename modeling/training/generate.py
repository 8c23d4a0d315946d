"""Samples of what a model writes, on whatever topology it lies: beginnings of held-out text, continued token by token.

Each token is one forward pass of the shape that evaluation uses, so nothing is compiled for it: a few passes more of an
evaluation that has many. The next token is drawn from softmax(logits / TEMPERATURE) over the CHOICES likeliest, by a seed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from modeling.data.corpus import Samples
from modeling.training.trainer import Trainer
from parallel import collectives

COUNT, PROMPT, LENGTH = 3, 16, 32  # samples; tokens of each that are given, and that are drawn
TEMPERATURE, CHOICES = 0.8, 40


def continuations(trainer: Trainer, held_out: Samples) -> list[dict[str, list[int]]]:
    """COUNT beginnings, evenly spaced over the held-out text, and how the model goes on: token ids. All ranks call it."""
    profile = trainer.profile
    s = profile.train.sequence_length
    given = min(PROMPT, s // 2)
    size = profile.train.micro_batch_size
    rows = size * (profile.accumulation_steps if trainer.pipeline else math.ceil(COUNT / size))
    count = min(COUNT, rows, held_out.windows)
    tokens = torch.zeros(rows, s + 1, dtype=torch.int64)  # (b, s + 1)
    for row in range(count):
        window = torch.from_numpy(held_out.batch(row * held_out.windows // count, 1))
        tokens[row, :given] = window[0, :given]
    length = min(LENGTH, s - given)
    for place in range(given, given + length):
        tokens[:count, place] = _next(trainer, tokens, place - 1, count)
    return [
        {"prompt": row[:given].tolist(), "text": row[given : given + length].tolist()}
        for row in tokens[:count]
    ]


@torch.no_grad()
def _next(trainer: Trainer, tokens: Tensor, place: int, count: int) -> Tensor:
    """The tokens (count) that follow the one at `place` of each row, the same on every rank."""
    mesh = trainer.mesh
    chosen = torch.zeros(count, dtype=torch.float64)
    counted = torch.ones(len(tokens), dtype=torch.bool)
    documents = torch.zeros_like(tokens[:, 1:]) if trainer.profile.train.document_masks else None
    with _hidden_states(trainer) as kept:
        trainer.evaluate(tokens if trainer.reads_samples else None, counted, documents)
    own = (trainer.positions == place).nonzero()  # of this context rank: one place or none
    if trainer.last:
        stage = trainer.stages[max(trainer.stages)]
        head = stage.embedding if stage.model.tie_word_embeddings else stage.head
        parts = [collectives.all_gather(x, mesh.tensor) if stage.sequence_parallel else x for x in kept]
        x = torch.cat(parts).view(len(tokens), len(trainer.positions), -1)[:count]  # (count, s/c, h)
        x = x[:, int(own[0])] if len(own) else x[:, 0]  # (count, h)
        shard = (head.weight @ x.T).contiguous()  # (v/t, count)
        logits = collectives.all_gather(shard, mesh.tensor).T[:, : stage.model.vocab_size]  # (count, v)
        if len(own):
            chosen = _draw(logits.float().cpu(), place).double()
    # Every data rank has chosen alike, and of the others one context rank of the last stage.
    return torch.tensor(trainer.sum(chosen)).div(mesh.data.size).round().long()


def _draw(logits: Tensor, seed: int) -> Tensor:
    """One of the likeliest tokens of each row (count, v) -> (count), by their probabilities."""
    likeliest, ids = logits.topk(min(CHOICES, logits.shape[-1]))
    shares = torch.softmax(likeliest / TEMPERATURE, -1)
    drawn = torch.multinomial(shares, 1, generator=torch.Generator().manual_seed(seed))
    return ids.gather(1, drawn)[:, 0]


@contextmanager
def _hidden_states(trainer: Trainer) -> Iterator[list[Tensor]]:
    """Where the last stage is here, collect the hidden states of each microbatch instead of making losses of them."""
    kept: list[Tensor] = []
    if not trainer.last:
        yield kept
        return
    stage = trainer.stages[max(trainer.stages)]

    def keep(x: Tensor, targets: Tensor) -> Tensor:
        kept.append(x.detach())
        return torch.zeros((), device=x.device)

    own, trainer.user_loss = trainer.user_loss, None  # the user's, which would be asked instead
    stage.loss = keep  # stands before the class's own
    try:
        yield kept
    finally:
        del stage.loss
        trainer.user_loss = own
