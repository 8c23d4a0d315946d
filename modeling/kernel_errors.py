"""Errors of the kernels that training uses, against plain formulas on the CPU: attention, the loss, AdamW's update.

Each is called as a model or the optimizer calls it, so it is the kernel that a run gets, on the shapes of one rank of a profile.
Sequences and shards are cut to what a CPU computes in seconds.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from modeling.models.build import partition_layers
from modeling.planning.memory import plan_buckets
from modeling.planning.stage_costs import StageCosts
from parallel.attention.attention import attention
from parallel.constraints import kv_replicas
from parallel.loss import linear_cross_entropy
from parallel.mesh import Axis
from parallel.optimizer.adamw import AdamW, adamw, update
from profiles.schema import Profile

SEQUENCE, TOKENS, SHARD = 2048, 256, 1 << 20  # at most: of attention, of the loss, elements of a shard
PRECISIONS = {"float32": torch.float32, "bf16": torch.bfloat16}
ONE = Axis("tensor")
Errors = dict[str, float]  # largest relative norm of a difference, by precision


def attention_errors(profile: Profile, device: torch.device) -> Errors:
    """Output and gradients of attention within a rank, masked by document and by window if the profile's is."""
    model, tensor = profile.model, profile.parallel.tensor
    kv = model.num_key_value_heads * kv_replicas(model.num_key_value_heads, tensor) // tensor
    s = min(_sequence(profile), SEQUENCE)
    heads = (model.num_attention_heads // tensor, kv, kv, model.num_attention_heads // tensor)
    inputs = [_normal(number, 1, n, s, model.head_dim) for number, n in enumerate(heads)]
    documents = torch.arange(s)[None] // max(1, s // 3) if profile.document_masks else None
    window = model.sliding_window and max(1, model.sliding_window * s // profile.train.sequence_length)

    def run(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, kernel: str | None = None) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        masks = None if documents is None else documents.to(q.device)
        out = attention(*leaves, Axis("context"), documents=masks, window=window, kernel=kernel)
        return [out, *torch.autograd.grad(out, leaves, grad)]

    return _errors(run, inputs, device, run(*inputs, kernel="math"))


def loss_errors(profile: Profile, device: torch.device) -> Errors:
    """Loss of a rank's part of the vocabulary, and its gradients by hidden states and head."""
    rows = -(-profile.model.vocab_size // profile.parallel.tensor)
    hidden = profile.model.hidden_size
    tokens = min(_sequence(profile), TOKENS)
    targets = torch.randint(rows, (tokens,), generator=torch.Generator().manual_seed(2))
    inputs = [_normal(0, tokens, hidden), _normal(1, rows, hidden) * 0.02]

    def run(x: Tensor, weight: Tensor) -> list[Tensor]:
        leaves = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
        first = torch.zeros((), dtype=torch.int64, device=x.device)
        loss = linear_cross_entropy(*leaves, targets.to(x.device), ONE, first=first, vocabulary=rows)
        return [loss, *torch.autograd.grad(loss, leaves)]

    logits = (leaves := [x.clone().requires_grad_() for x in inputs])[0] @ leaves[1].t()
    loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    return _errors(run, inputs, device, [loss, *torch.autograd.grad(loss, leaves)])


def update_errors(profile: Profile, device: torch.device) -> Errors:
    """Weights and moments after an update of the largest shard of a bucket, in float32."""
    train = profile.train
    settings = AdamW(train.betas, train.epsilon)
    costs = StageCosts(profile)
    buckets = plan_buckets(profile, [costs.module(partition_layers(profile)[0])])
    n = min(max(bucket.size // bucket.shards for bucket in buckets if not bucket.frozen), SHARD)
    inputs = [_normal(0, n), _normal(1, n), _normal(2, n), _normal(3, n).abs()]

    def run(*tensors: Tensor) -> list[Tensor]:
        local = tensors[0].device
        step, divisor, skip = (torch.full((), value, device=local) for value in (3.0, 1.5, 0.0))
        adamw(
            *tensors, settings=settings, weight_decay=train.weight_decay, learning_rate=train.learning_rate,
            constants=settings.constants(train.weight_decay, local), step=step, divisor=divisor, skip=skip,
        )  # fmt: skip
        return [tensors[0], *tensors[2:]]

    weights, gradient, *moments = (x.clone() for x in inputs)
    scalars = tuple(map(torch.tensor, (3.0, train.learning_rate, 1.5, 0.0)))
    update(weights, gradient, *moments, scalars, settings.constants(train.weight_decay, weights.device))
    actual = run(*(x.to(device, copy=True) for x in inputs))
    return {"float32": _largest(actual, [weights, *moments])}


KERNELS = {"attention": attention_errors, "loss": loss_errors, "update": update_errors}


def _sequence(profile: Profile) -> int:
    return profile.train.sequence_length // profile.parallel.context


def _normal(seed: int, *sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


def _errors(
    run: Callable[..., list[Tensor]], inputs: list[Tensor], device: torch.device, expected: list[Tensor]
) -> Errors:
    """Errors of a function of the inputs on the device, in each precision."""
    return {
        precision: _largest(run(*(x.to(device, dtype) for x in inputs)), expected)
        for precision, dtype in PRECISIONS.items()
    }


def _largest(actual: list[Tensor], expected: list[Tensor]) -> float:
    pairs = zip(actual, expected, strict=True)
    return max(((x.detach().float().cpu() - y).norm() / y.norm()).item() for x, y in pairs)
