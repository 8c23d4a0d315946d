"""Cross-entropy over a vocabulary that is split over the tensor axis.

With logits z (tokens × v), loss = log Σ exp z - z[target]. Over t ranks: the maximum, the sum of exponentials and the
target's logit are each one reduction of a number a token (arXiv 1909.08053, section 3).

`linear_cross_entropy` fuses the output projection z = X Wᵀ with the loss and walks over chunks of tokens, so that full
logits never exist: a chunk's logits become its gradient in place, and dX and dW come out of the forward pass (as in Liger,
arXiv 2410.10989). Memory: one chunk × v/t in float32, instead of tokens × v/t in float32 and in the model's type.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from parallel import collectives
from parallel.backward import wanted
from parallel.mesh import Axis

IGNORE = -100
CHUNK_BYTES = 32 << 20  # of float32 logits


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    axis: Axis,
    *,
    first: Tensor,
    vocabulary: int,
    sequence_parallel: bool = False,
    chunk: int | None = None,
) -> Tensor:
    """Summed cross-entropy of the output projection X Wᵀ.

    Args:
        x: (b·s, h), or (b·s/t, h) with sequence parallelism.
        weight: (ceil(v/t), h), this rank's rows.
        targets: (b·s) token ids; IGNORE (-100) counts nothing.
        axis: the tensor axis.
        first: 0-dim tensor, the number of this rank's first row.
        vocabulary: v, unpadded.
        chunk: tokens a step, by default as many as fit 32 MB of float32 logits.

    Returns:
        0-dim float32 sum over the tokens, the same on every rank of the axis.

    Raises:
        ValueError: shapes that do not meet.
    """
    tokens = x.shape[0] * (axis.size if sequence_parallel else 1)
    if targets.shape != (tokens,):
        raise ValueError(f"linear_cross_entropy: targets {tuple(targets.shape)} for {tokens} tokens")
    if x.shape[1] != weight.shape[1]:
        raise ValueError(f"linear_cross_entropy: x is {x.shape[1]} wide, the weight {weight.shape[1]}")
    chunk = chunk or max(64, CHUNK_BYTES // (4 * weight.shape[0]))
    return _LinearCrossEntropy.apply(x, weight, targets, axis, first, vocabulary, sequence_parallel, chunk)


class _LinearCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        axis: Axis,
        first: Tensor,
        vocabulary: int,
        sequence: bool,
        chunk: int,
    ) -> Tensor:
        whole = collectives.all_gather(x, axis) if sequence else x  # (b·s, h)
        train = any(ctx.needs_input_grad)
        grad_x = torch.empty_like(whole) if train else None
        wide = torch.promote_types(weight.dtype, torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=wide) if train else None
        total = whole.new_zeros((), dtype=wide)
        for start in range(0, whole.shape[0], chunk):
            piece = whole[start : start + chunk]  # (chunk, h)
            target = targets[start : start + chunk]
            loss, grad = _chunk(piece @ weight.t(), target, axis, first, vocabulary, train)
            total += loss
            if train:
                # Tokens that do not count are masked where it is cheap: in h, not in v.
                counted = (target != IGNORE)[:, None].to(piece.dtype)  # (chunk, 1)
                piece = piece * counted
                grad = grad.to(weight.dtype)  # (chunk, v/t)
                torch.mul(grad @ weight, counted, out=grad_x[start : start + chunk])
                if weight.dtype == grad_weight.dtype:
                    grad_weight.addmm_(grad.t(), piece)
                else:
                    grad_weight += grad.t() @ piece
        if train:
            if sequence:
                grad_x = collectives.reduce_scatter(grad_x, axis)
            else:
                grad_x = collectives.all_reduce(grad_x, axis)
            ctx.save_for_backward(grad_x, grad_weight.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_weight = ctx.saved_tensors
        grad_x = grad_x * grad if wanted(ctx, 0) else None
        grad_weight = grad_weight * grad if wanted(ctx, 1) else None
        return grad_x, grad_weight, None, None, None, None, None, None


def _chunk(
    logits: Tensor, targets: Tensor, axis: Axis, first: Tensor, vocabulary: int, train: bool
) -> tuple[Tensor, Tensor | None]:
    """Loss of a chunk and d loss / d logits as if every token counted, for logits (c, ceil(v/t)) and targets (c)."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if vocabulary % axis.size:
        columns = torch.arange(logits.shape[1], device=logits.device) + first
        logits.masked_fill_(columns >= vocabulary, -torch.inf)  # padding never receives probability
    counted = targets != IGNORE  # (c)
    rows = targets - first
    own = (rows >= 0) & (rows < logits.shape[1])
    rows = rows.where(own, 0)[:, None]  # (c, 1)
    at_target = logits.gather(1, rows)[:, 0].where(own, 0)  # (c)
    if axis.size == 1:
        highest = logits.amax(1)
        probability = torch.softmax(logits, 1)
        # log Σ exp z = z_max - log p_max, exact where the smallest p has long underflowed
        log_sum = highest - probability.amax(1).log()
    else:
        highest = collectives.all_reduce_max(logits.amax(1), axis)  # (c)
        probability = logits.sub_(highest[:, None]).exp_()
        sums = collectives.all_reduce(torch.stack((probability.sum(1), at_target)), axis)  # (2, c)
        log_sum, at_target = highest + sums[0].log(), sums[1]
        if train:
            probability.div_(sums[0][:, None])
    loss = (log_sum - at_target).where(counted, 0).sum()
    if not train:
        return loss, None
    probability.scatter_add_(1, rows, -own[:, None].to(probability.dtype))
    return loss, probability


def vocab_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, axis: Axis, *, first: Tensor, vocabulary: int
) -> Tensor:
    """Cross-entropy of each token from logits that exist, for losses of one's own.

    Args:
        logits: (..., ceil(v/t)), this rank's columns.
        targets: (...) token ids; IGNORE (-100) gives 0.
        axis, first, vocabulary: as for `linear_cross_entropy`.

    Returns:
        (...) float32.
    """
    flat = _VocabParallelCrossEntropy.apply(logits.flatten(0, -2), targets.flatten(), axis, first, vocabulary)
    return flat.view(targets.shape)


class _VocabParallelCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, axis: Axis, first: Tensor, vocabulary: int
    ) -> Tensor:
        counted = targets != IGNORE
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if vocabulary % axis.size:
            columns = torch.arange(wide.shape[1], device=wide.device) + first
            wide = wide.masked_fill(columns >= vocabulary, -torch.inf)
        highest = collectives.all_reduce_max(wide.amax(1), axis)  # (tokens)
        rows = targets - first
        own = (rows >= 0) & (rows < wide.shape[1])
        rows = rows.where(own, 0)[:, None]
        at_target = wide.gather(1, rows)[:, 0].where(own, 0)
        exponentials = (wide - highest[:, None]).exp_()  # (tokens, v/t)
        sums = collectives.all_reduce(torch.stack((exponentials.sum(1), at_target)), axis)
        gradient = exponentials.div_(sums[0][:, None])
        gradient.scatter_add_(1, rows, -own[:, None].to(gradient.dtype))
        ctx.save_for_backward(gradient, counted)
        ctx.dtype = logits.dtype
        return (highest + sums[0].log() - sums[1]).where(counted, 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradient, counted = ctx.saved_tensors
        return (gradient * (grad * counted)[:, None]).to(ctx.dtype), None, None, None, None
