"""Cross-entropy over a vocabulary split over the tensor axis.

With logits z (tokens × v), loss = log Σ exp z - z[target]. The maximum, the sum of exponentials and the target's logit are
reduced over the t ranks, one number per token each (arXiv 1909.08053, section 3).

`linear_cross_entropy` fuses the output projection z = X Wᵀ with the loss, in chunks of tokens, so that the full logits never
exist: a chunk's logits are overwritten by their gradient, and forward computes dX and dW too (like Liger, arXiv 2410.10989).
Memory: one chunk × v/t in float32, instead of tokens × v/t in float32 and in the model's dtype. Every chunk runs the same
program, `chunk_loss`, so the graph is independent of the number of tokens. The code before and after the loop consists of
programs too (`LossPrograms`).

Each chunk reads and writes the float32 sum dW. If the gradients of all logits need no more memory in 16 bits, GPUs keep them
instead (`choose_chunks`), and compute dX and dW by one product each, as without chunks.

A soft cap c replaces the logits by c · tanh(z / c) (Gemma 2, arXiv 2408.00118), in float32; their gradient is multiplied by
1 - (z / c)², with the capped z.

On a CPU, tokens without a target (prompts and padding of fine-tuning) are dropped before the products (`_with_target`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from parallel import collectives
from parallel import device as devices
from parallel.backward import needs_gradient
from parallel.device import Device, becomes_one_kernel
from parallel.host_products import add_product, multiply
from parallel.mesh import Axis

IGNORE_INDEX = -100
HOST_BYTES = 32 << 20  # of a chunk's float32 logits on a CPU, where larger ones leave its caches
HOST_TOKENS = 512  # of a chunk on a CPU: larger ones are slower, by 13% at 2,048 tokens of 4,096 logits
MEMORY_SHARE = 1 / 64  # of an accelerator's memory that a chunk's float32 logits may take
TRAFFIC_SHARE = 1 / 4  # of the time of a chunk's products that its traffic for the weight may take
RIDGE = 256.0  # assumed ratio of FLOP/s to memory bandwidth of an accelerator of unknown speed

ChunkLoss = Callable[..., Tensor]
"""`chunk_loss`, or a compiled version of it."""


def chunk_tokens(tokens: int, rows: int, device: Device) -> int:
    """Tokens per `linear_cross_entropy` chunk, equal if a chunk count near the minimum divides `tokens`.

    An accelerator's chunk is large enough for its products, 6 FLOPs per weight element and token, to hide its memory traffic per
    weight element: 16 bytes, for two reads of the weight, one product written and read, and the float32 sum of gradients read
    and written.

    Args:
        tokens: of all chunks together.
        rows: ceil(v/t), the columns of the logits.
        device: its memory and speed decide.
    """
    if device.memory_bytes is None:
        limit = min(HOST_TOKENS, max(64, HOST_BYTES // (4 * rows)))
    else:
        peak, bandwidth = device.peak("bf16"), device.bandwidth
        ridge = peak / bandwidth if peak and bandwidth else RIDGE
        in_memory = device.memory_bytes * MEMORY_SHARE / (4 * rows)
        limit = max(128, int(min(ridge * 16 / 6 / TRAFFIC_SHARE, in_memory)) // 128 * 128)
    return _equal_chunks(tokens, limit)


def _equal_chunks(tokens: int, limit: int) -> int:
    """Tokens per chunk, at most `limit`: equal if a chunk count near the minimum divides `tokens`."""
    fewest = -(-tokens // limit)
    chunks = next((n for n in range(fewest, 2 * fewest) if tokens % n == 0), fewest)
    return -(-tokens // chunks)


class Chunks(NamedTuple):
    """How `linear_cross_entropy` divides tokens."""

    tokens: int  # of a chunk
    keep: bool  # whether to keep the gradients of all logits, instead of adding up dW


def choose_chunks(tokens: int, weight: Tensor, device: Device) -> Chunks:
    """The loss's chunks on a device; arguments as for `chunk_tokens`.

    With h columns of the weight, chunks of c tokens need 4h bytes per row for the sum dW, 8c in float32 for the logits of a chunk
    and their gradients, and at the end 2h for dW in bf16: max(4h + 8c, 6h). Kept gradients of T tokens need 2T, with half the
    chunk 4c, and at the end 2h: no more if T ≤ 2 (h + c) and T ≤ max(h + 4c, 2h). Only GPUs keep them: CPUs have chunks that fit
    their caches, Trainium one program, to compile faster. Plans and traces on any machine choose as the device does.
    """
    chunk = chunk_tokens(tokens, weight.shape[0], device)
    keeps = device.type == "cuda" and weight.requires_grad and weight.element_size() == 2
    h = weight.shape[1]
    if keeps and tokens <= min(2 * (h + chunk), max(h + 4 * chunk, 2 * h)):
        return Chunks(_equal_chunks(tokens, -(-chunk // 2)), True)
    return Chunks(chunk, False)


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
    keep: bool = False,
    programs: LossPrograms | None = None,
    weights: Tensor | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Summed cross-entropy of the output projection X Wᵀ.

    Args:
        x: (b·s, h), or (b·s/t, h) with sequence parallelism.
        weight: (ceil(v/t), h), this rank's rows.
        targets: (b·s) token ids; IGNORE_INDEX (-100) is ignored.
        axis: tensor axis.
        first: 0-dim tensor, index of this rank's first row.
        vocabulary: v, unpadded.
        chunk: tokens per chunk; None: `choose_chunks` for the tensors' device, which then decides on `keep`.
        keep: whether to keep the gradients of all logits (`choose_chunks`), if the weight is trained.
        programs: compiled versions of this module's functions; None: the functions themselves.
        weights: (b·s), of each token in the sum, without gradient; None: 1.
        soft_cap: of the logits; None: none.

    Returns:
        0-dim sum over the tokens, in float32 (float64 for float64 inputs), the same on every rank of the axis.

    Raises:
        ValueError: mismatched shapes.
    """
    tokens = x.shape[0] * (axis.size if sequence_parallel else 1)
    if targets.shape != (tokens,):
        raise ValueError(
            f"linear_cross_entropy: targets have shape {tuple(targets.shape)}, expected ({tokens},)"
        )
    if x.shape[1] != weight.shape[1]:
        raise ValueError(f"linear_cross_entropy: x has width {x.shape[1]}, the weight {weight.shape[1]}")
    if chunk is None:
        kind = x.device.type
        known = devices.resolve(kind) if kind in devices.KINDS else devices.CPU
        chunk, keep = choose_chunks(tokens, weight, known)
    programs = programs or LossPrograms()
    train = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    keep = keep and train and weight.requires_grad
    inputs, head = x.detach(), weight.detach()
    inputs = collectives.all_gather(inputs, axis) if sequence_parallel else inputs  # (b·s, h)
    # Compiled programs accept full chunks only.
    counted = _with_target(targets, 1 if programs.chunk is chunk_loss else chunk)
    if counted is not None:
        inputs, targets = inputs[counted.rows], targets[counted.rows]  # (counted, h), (counted)
        targets[counted.number :] = IGNORE_INDEX
        weights = None if weights is None else weights[counted.rows]
        tokens = len(counted.rows)
    grad_x = torch.empty_like(inputs) if train and not keep else None
    kept = head.new_empty(tokens, len(head)) if keep else None
    # A frozen weight needs no gradient, which saves its product.
    total, grad_weight = programs.begin(head, train and weight.requires_grad and not keep)
    capped = {} if soft_cap is None else {"soft_cap": soft_cap}
    for start in range(0, tokens, chunk):
        rows = slice(start, start + chunk)
        summed = None if grad_x is None else (grad_x[rows], grad_weight)
        gradients = summed if kept is None else kept[rows]
        part = (inputs[rows], head, targets[rows], total, gradients, axis, first, vocabulary)
        weighted = () if weights is None else (weights[rows],)
        total = programs.chunk(*part, *weighted, **capped)
    if kept is not None:
        grad_x, grad_weight = programs.products(kept, inputs, head)
    if grad_x is None:
        return total
    grad_x = grad_x if counted is None else counted.restore(grad_x)  # (b·s, h)
    if sequence_parallel:
        grad_x = collectives.reduce_scatter(grad_x, axis)  # (b·s/t, h)
    else:
        grad_x = collectives.all_reduce(grad_x, axis)
    if grad_weight is not None and grad_weight.dtype != weight.dtype:
        grad_weight = programs.convert(grad_weight, weight.dtype)
    return _WithGradients.apply(x, weight, total, grad_x, grad_weight, programs.scale)


class _Counted(NamedTuple):
    """Indices of the tokens that have a target, followed by fillers."""

    rows: Tensor  # (counted)
    number: int  # of the tokens that have a target
    tokens: int  # all of them

    def restore(self, values: Tensor) -> Tensor:
        """Values (counted, ...) of the rows, as those of all tokens: 0 without a target."""
        full = values.new_zeros(self.tokens, *values.shape[1:])
        return full.index_copy_(0, self.rows[: self.number], values[: self.number])


def _with_target(targets: Tensor, multiple: int) -> _Counted | None:
    """Indices of the tokens that have a target, padded with fillers to a multiple.

    None if that drops no token, and on devices where the count would cost a host synchronization.
    """
    if targets.device.type != "cpu" or type(targets) is not Tensor:
        return None
    counted = (targets != IGNORE_INDEX).nonzero()[:, 0]  # (counted)
    count = len(counted)
    size = -(-count // multiple) * multiple
    if size >= len(targets):
        return None
    return _Counted(torch.cat((counted, counted.new_zeros(size - count))), count, len(targets))


class _WithGradients(Function):
    """A value whose gradients with respect to x and the weight are already computed."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        value: Tensor,
        grad_x: Tensor,
        grad_weight: Tensor | None,
        scale: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        ctx.save_for_backward(grad_x, grad_weight)
        ctx.scale = scale
        return value.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_weight = ctx.saved_tensors
        grad_x = ctx.scale(grad_x, grad) if needs_gradient(ctx, 0) else None
        used = grad_weight is not None and needs_gradient(ctx, 1)
        return grad_x, ctx.scale(grad_weight, grad) if used else None, None, None, None, None


def begin_sums(weight: Tensor, gradient: bool) -> tuple[Tensor, Tensor | None]:
    """Zeros, float32: the total of the loss, and the gradient of the weight if it needs one."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return weight.new_zeros((), dtype=wide), torch.zeros_like(weight, dtype=wide) if gradient else None


def convert(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """A gradient in another dtype."""
    return gradient.to(dtype)


def scale(gradient: Tensor, factor: Tensor) -> Tensor:
    """A gradient times a 0-dim factor."""
    return gradient * factor


def chunk_loss(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    total: Tensor,
    gradients: tuple[Tensor, Tensor | None] | Tensor | None,
    axis: Axis,
    first: Tensor,
    vocabulary: int,
    weights: Tensor | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Return total + the loss of one chunk x (c, h), targets (c).

    Args:
        total: 0-dim sum of earlier chunks.
        gradients: the chunk's rows of dX (c, h), written, and dW (ceil(v/t), h) in float32, added to, or None
            for a frozen weight; or the kept gradients of its logits (c, ceil(v/t)), written; None in evaluation.
    """
    train = gradients is not None
    logits = _logits(x, weight, soft_cap)
    slope = 1 - (logits / soft_cap).square() if train and soft_cap is not None else None
    losses, grad_logits = _logits_loss(logits, targets, axis, first, vocabulary, train)
    del logits  # its memory is free for the products
    if gradients is not None and grad_logits is not None:
        if slope is not None:
            grad_logits.mul_(slope)
            del slope
        if isinstance(gradients, Tensor):
            gradients.copy_(grad_logits.mul_(_factors(targets, weights, grad_logits)))
        else:
            grad_x, grad_weight = gradients
            grad_logits = grad_logits.to(weight.dtype)  # frees the float32 gradient before the products
            # Ignored targets are masked in (chunk, h), which is cheaper than in (chunk, v/t).
            factors = _factors(targets, weights, x)
            torch.mul(multiply(grad_logits, weight), factors, out=grad_x)
            if grad_weight is not None:
                add_product(grad_weight, grad_logits.t(), x * factors)
    return total + (losses if weights is None else losses * weights).sum()


def multiply_gradients(kept: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """dX and dW of the kept gradients of all logits."""
    return multiply(kept, weight), multiply(kept.t(), x)


@torch.no_grad()
def token_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    axis: Axis,
    *,
    first: Tensor,
    vocabulary: int,
    sequence_parallel: bool = False,
    chunk: int,
    programs: LossPrograms | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Per-token float32 cross-entropy (b·s) of the logits X Wᵀ, without gradient; 0 for ignored targets.

    Arguments as for `linear_cross_entropy`; as there, only one chunk's logits exist at a time.
    """
    x = collectives.all_gather(x, axis) if sequence_parallel else x  # (b·s, h)
    programs = programs or LossPrograms()
    weight = weight.detach()
    counted = _with_target(targets, 1 if programs.tokens is chunk_token_losses else chunk)
    if counted is not None:
        if not counted.number:  # no tensor rank has a target
            return x.new_zeros(counted.tokens, dtype=torch.promote_types(x.dtype, torch.float32))
        x, targets = x[counted.rows], targets[counted.rows]  # (counted, h), (counted)
        targets[counted.number :] = IGNORE_INDEX
    capped = {} if soft_cap is None else {"soft_cap": soft_cap}
    parts = zip(x.split(chunk), targets.split(chunk), strict=True)
    found = programs.join(
        [programs.tokens(part, weight, each, axis, first, vocabulary, **capped) for part, each in parts]
    )
    return found if counted is None else counted.restore(found)  # (b·s)


def chunk_token_losses(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    axis: Axis,
    first: Tensor,
    vocabulary: int,
    soft_cap: float | None = None,
) -> Tensor:
    """Cross-entropy (c) of each token of a chunk x (c, h), 0 for an ignored target."""
    return _logits_loss(_logits(x, weight, soft_cap), targets, axis, first, vocabulary, train=False)[0]


def join(losses: Sequence[Tensor]) -> Tensor:
    """Concatenate the token losses of all chunks."""
    return torch.cat([*losses])


class LossPrograms(NamedTuple):
    """The functions that compute losses: those of this module, or compiled versions of them."""

    chunk: ChunkLoss = chunk_loss
    tokens: Callable[..., Tensor] = chunk_token_losses
    products: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] = multiply_gradients
    join: Callable[[Sequence[Tensor]], Tensor] = join
    begin: Callable[[Tensor, bool], tuple[Tensor, Tensor | None]] = begin_sums
    convert: Callable[[Tensor, torch.dtype], Tensor] = convert
    scale: Callable[[Tensor, Tensor], Tensor] = scale


def _logits(x: Tensor, weight: Tensor, soft_cap: float | None) -> Tensor:
    """The logits (c, ceil(v/t)) of a chunk in float32 (float64 for float64); bf16 ones are freed."""
    logits = multiply(x, weight.t())
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if soft_cap is None else logits.div_(soft_cap).tanh_().mul_(soft_cap)


def _logits_loss(
    logits: Tensor, targets: Tensor, axis: Axis, first: Tensor, vocabulary: int, train: bool
) -> tuple[Tensor, Tensor | None]:
    """Losses (c), 0 for ignored targets, and their sum's gradient with respect to logits (c, ceil(v/t)).

    Overwrites the logits on several ranks. The gradient includes ignored targets.
    """
    if vocabulary % axis.size:
        columns = torch.arange(logits.shape[1], device=logits.device)
        logits.masked_fill_(columns + first >= vocabulary, -torch.inf)  # padding must not receive probability
    counted = targets != IGNORE_INDEX  # (c)
    columns, local = _local_columns(targets, first, logits)
    at_target = logits.gather(1, columns)[:, 0].where(local, 0)  # (c)
    fused = becomes_one_kernel(logits)
    if axis.size == 1 and fused:
        # `logsumexp` takes two passes over the logits; inductor replaces these operators by one.
        highest = logits.amax(1, keepdim=True)
        exponentials = (logits - highest).exp()
        sums = exponentials.sum(1, keepdim=True)
        log_sum, probability = (highest + sums.log())[:, 0], exponentials / sums
    elif axis.size == 1:
        highest = logits.amax(1)
        probability = torch.softmax(logits, 1)
        # log Σ exp z = z_max - log p_max, exact even where the smallest p underflows
        log_sum = highest - probability.amax(1).log()
    else:
        log_sum, at_target, probability, sums = _reduce_vocabulary(logits, at_target, axis)
        if train:
            probability.div_(sums[:, None])
    losses = (log_sum - at_target).where(counted, 0)  # (c)
    if not train:
        return losses, None
    if fused:
        numbers = torch.arange(logits.shape[1], device=logits.device)
        return losses, probability - (numbers == columns.where(local[:, None], -1)).to(probability.dtype)
    probability.scatter_add_(1, columns, -local[:, None].to(probability.dtype))
    return losses, probability


def _factors(targets: Tensor, weights: Tensor | None, like: Tensor) -> Tensor:
    """Weights (c, 1) of tokens in the sum, 0 for ignored targets."""
    counted = (targets != IGNORE_INDEX)[:, None].to(like.dtype)
    return counted if weights is None else counted * weights[:, None].to(like.dtype)


def _local_columns(targets: Tensor, first: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Column of each target (c, 1), 0 for another rank's, and whether it is in this rank's shard (c)."""
    columns = targets - first
    local = (columns >= 0) & (columns < logits.shape[1])
    return columns.where(local, 0)[:, None], local


def _reduce_vocabulary(
    logits: Tensor, at_target: Tensor, axis: Axis
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Softmax statistics over all ranks' logits (c, ceil(v/t)), overwritten, and local target logits (c).

    Returns:
        log Σ exp z (c), target logits (c), exp(z - max z) (c, ceil(v/t)), and its sum over the vocabulary (c).
    """
    highest = collectives.all_reduce_max(logits.amax(1), axis)  # (c)
    exponentials = logits.sub_(highest[:, None]).exp_()
    sums = collectives.all_reduce(torch.stack((exponentials.sum(1), at_target)), axis)  # (2, c)
    return highest + sums[0].log(), sums[1], exponentials, sums[0]
