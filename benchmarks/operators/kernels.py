"""Time a training kernel, ours or a library's: attention, loss with its projection, AdamW's update.

    python -m benchmarks.operators.kernels attention flash_attn --device cuda

Runs forward and backward on one device, in bf16 with Llama 3.2 1B's sizes, as training calls it; the sizes `small` are for CPUs.
Prints the fields of `Measurement` as a JSON line; `losses` are norms of the results, which must agree with the library's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.harness.timing import make_parser
from modeling.compilation.graph_cache import OPTIONS
from parallel import device as devices
from parallel.attention.attention import attention
from parallel.loss import LossPrograms, chunk_loss, linear_cross_entropy
from parallel.mesh import Axis
from parallel.optimizer.adamw import AdamW, adamw

Call = Callable[[], list[Tensor]]  # returns the results to compare


@dataclass(frozen=True)
class Sizes:
    """Operand sizes; `document` is tokens per document, `shard` the number of AdamW's elements."""

    sequence: int
    heads: int
    kv_heads: int
    head_size: int
    document: int
    hidden: int
    vocabulary: int
    shard: int


SIZES = {
    "1b": Sizes(8192, 32, 8, 64, 1024, 2048, 128256, 1 << 28),
    "8b": Sizes(8192, 32, 8, 128, 1024, 4096, 128256, 1 << 28),
    "small": Sizes(256, 8, 2, 32, 64, 64, 512, 1 << 16),
}


class Inputs:
    """Random operands in bf16 on a device, the same for every side."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._seed = device, 0

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        generator = torch.Generator(self._device).manual_seed(self._seed)
        self._seed += 1
        values = torch.randn(shape, generator=generator, device=self._device).mul_(scale)
        return values.to(dtype).requires_grad_(dtype == torch.bfloat16)

    def tokens(self, count: int, vocabulary: int) -> Tensor:
        generator = torch.Generator(self._device).manual_seed(99)
        return torch.randint(vocabulary, (count,), generator=generator, device=self._device)


def make_attention(side: str, sizes: Sizes, inputs: Inputs, documents: bool = False) -> Call:
    """Causal attention of one sequence with grouped queries, optionally within documents of equal length."""
    s, d, length = sizes.sequence, sizes.head_size, sizes.document if documents else sizes.sequence
    q, k, v = (inputs.normal(1, n, s, d) for n in (sizes.heads, sizes.kv_heads, sizes.kv_heads))
    grad = inputs.normal(1, sizes.heads, s, d).detach()
    indices = (torch.arange(s, device=q.device) // length)[None]

    def ours() -> Tensor:
        return attention(q, k, v, Axis("context"), documents=indices if documents else None)

    if documents and q.is_cuda:  # as in training, whose graphs contain the mask
        ours = torch.compile(ours, fullgraph=True, dynamic=False)

    def plain() -> Tensor:
        """Documents of equal length are the rows of a batch."""
        q_, k_, v_ = (x[0].unflatten(1, (-1, length)).transpose(0, 1) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q_, k_, v_, is_causal=True, enable_gqa=True)
        return out.transpose(0, 1).flatten(1, 2)[None]

    def cudnn() -> Tensor:
        grouped = _takes_cudnn(q, k, v)
        k_, v_ = (
            (k, v) if grouped else (x.repeat_interleave(sizes.heads // sizes.kv_heads, 1) for x in (k, v))
        )
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k_, v_, is_causal=True, enable_gqa=grouped)

    def flash_attention_3() -> Tensor:
        from flash_attn_interface import flash_attn_func

        out = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=True)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)  # some versions return lse too

    def flash_attn() -> Tensor:
        from flash_attn import flash_attn_func, flash_attn_varlen_func

        rows = [x.transpose(1, 2) for x in (q, k, v)]  # (1, s, heads, d)
        if not documents:
            return flash_attn_func(*rows, causal=True).transpose(1, 2)
        bounds = torch.arange(0, s + 1, length, device=q.device, dtype=torch.int32)
        out = flash_attn_varlen_func(*(x[0] for x in rows), bounds, bounds, length, length, causal=True)
        return out.transpose(0, 1)[None]

    sides = {"ours": ours, "torch": plain, "cudnn": cudnn}
    attend = {**sides, "flash_attn": flash_attn, "flash_attn_interface": flash_attention_3}[side]

    def call() -> list[Tensor]:
        out = attend()
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]

    return call


def has_cudnn(kind: str) -> bool:
    """Whether cuDNN's attention runs on this machine's devices of this type."""
    if kind != "cuda" or not torch.cuda.is_available():
        return False
    return _takes_cudnn(*(torch.empty(1, 1, 128, 128, dtype=torch.bfloat16, device=kind) for _ in range(3)))


def _takes_cudnn(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether cuDNN computes causal attention of these tensors, whose KV heads may be grouped."""
    return can_use_cudnn_attention(SDPAParams(q, k, v, None, 0.0, True, True))


def make_loss(side: str, sizes: Sizes, inputs: Inputs) -> Call:
    """Cross-entropy of a projection to the vocabulary, summed over tokens."""
    x = inputs.normal(sizes.sequence, sizes.hidden)
    weight = inputs.normal(sizes.vocabulary, sizes.hidden, scale=0.02)
    targets = inputs.tokens(sizes.sequence, sizes.vocabulary)
    first = torch.zeros((), dtype=torch.int64, device=x.device)

    def ours() -> Tensor:
        return linear_cross_entropy(
            x, weight, targets, Axis("tensor"), first=first, vocabulary=sizes.vocabulary, programs=programs
        )

    def plain() -> Tensor:
        return compiled(x, weight, targets)

    def liger() -> Tensor:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        return LigerFusedLinearCrossEntropyLoss(reduction="sum")(weight, x, targets)

    programs = LossPrograms(torch.compile(chunk_loss, **OPTIONS))
    compiled = torch.compile(plain_loss)
    loss = {"ours": ours, "torch": plain, "liger_kernel": liger}[side]

    def call() -> list[Tensor]:
        value = loss()
        return [value.detach(), *torch.autograd.grad(value, (x, weight))]

    return call


def plain_loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Summed cross-entropy from all logits at once, in float32."""
    return F.cross_entropy((x @ weight.t()).float(), targets, reduction="sum")


def make_adamw(side: str, sizes: Sizes, inputs: Inputs) -> Call:
    """An update of a shard in float32."""
    values = [inputs.normal(sizes.shard, dtype=torch.float32) for _ in range(4)]
    weights, gradient, average, average_sq = values
    average_sq.abs_()
    settings, rate, decay = AdamW((0.9, 0.95), 1e-8), 1e-3, 0.1
    advance: Callable[[], object]
    if side == "torch":
        weights.grad = gradient
        optimizer = torch.optim.AdamW(
            [weights], rate, settings.betas, settings.epsilon, weight_decay=decay, fused=True
        )
        step = torch.zeros((), device=weights.device)
        optimizer.state[weights] = {"step": step, "exp_avg": average, "exp_avg_sq": average_sq}
        advance = optimizer.step
    else:
        constants = settings.constants(decay, weights.device)
        step, divisor, skip = (torch.full((), value, device=weights.device) for value in (0.0, 1.0, 0.0))

        def ours() -> None:
            step.add_(1)
            adamw(
                *values, settings=settings, weight_decay=decay, constants=constants, step=step,
                learning_rate=rate, divisor=divisor, skip=skip,
            )  # fmt: skip

        advance = ours

    def call() -> list[Tensor]:
        advance()
        return [weights, average, average_sq]

    return call


KERNELS: dict[str, tuple[Callable[[str, Sizes, Inputs], Call], tuple[str, ...]]] = {
    "attention": (make_attention, ("ours", "torch", "cudnn", "flash_attn", "flash_attn_interface")),
    "documents": (partial(make_attention, documents=True), ("ours", "torch", "flash_attn")),
    "loss": (make_loss, ("ours", "torch", "liger_kernel")),
    "adamw": (make_adamw, ("ours", "torch")),
}


def measure(call: Call, device: devices.Device, warm_up: int, steps: int) -> Iterator[float]:
    """Seconds of each timed call, by the device's own clock."""
    for number in range(warm_up + steps):
        start = device.mark()
        call()
        end = device.mark()
        device.synchronize()
        if number >= warm_up:
            yield device.seconds(start, end)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("kernel", choices=KERNELS)
    parser.add_argument("side", help="ours, or a library")
    parser.add_argument("--device", choices=sorted(devices.KINDS), default="cpu")
    parser.add_argument("--sizes", choices=SIZES, default="1b")
    parser.add_argument("--warm-up", type=int, default=3, help="untimed calls (default: 3)")
    parser.add_argument("--steps", type=int, default=20, help="timed calls (default: 20)")
    options = parser.parse_args()
    make, sides = KERNELS[options.kernel]
    if options.side not in sides:
        parser.error(f"argument side: {options.side!r} (choose from {', '.join(sides)})")
    device = devices.resolve(options.device)
    local = device.set_current()
    call = make(options.side, SIZES[options.sizes], Inputs(local))
    norms = [tensor.float().norm().item() for tensor in call()]
    seconds = list(measure(call, device, options.warm_up, options.steps))
    print(json.dumps({"seconds": seconds, "losses": norms}))


if __name__ == "__main__":
    main()
