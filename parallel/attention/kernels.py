"""Block kernels: attention of some queries to some keys, together with what merging blocks and their backward need.

    scores = scale · q kᵀ;   lse = log Σ exp(scores);   out = exp(scores - lse) v

Given lse over all keys rather than the block's own, backward gives the block's part of the whole gradient:

    p = exp(scores - lse);   dv = pᵀ do;   ds = p ∘ (do vᵀ - rowsum(do ∘ out));   dq = scale · ds k;   dk = scale · dsᵀ q

(FlashAttention-2, arXiv 2307.08691). One seam, `Kernel`, and a name for each way of computing it; a device's own name stands
in device.py.

Shapes: q, out (b, n, s, d); k, v (b, k, t, d), n a multiple of k; lse (b, n, s).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel import device

_aten = torch.ops.aten

Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Block:
    """What a kernel works on. A query sees the keys where `mask` (b, 1, s, t) is True; with `causal` those up to its own, the
    last query being level with the last key (s <= t); else all of them. `mask` and `causal` exclude each other.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    causal: bool
    scale: float

    def bias(self, multiple: int = 1) -> Tensor | None:
        """What is added to scores to hide keys, (b or 1, 1, s, t) in q's type, None where each query sees all. Its lines
        start at multiples of so many elements.
        """
        s, t = self.q.shape[2], self.k.shape[2]
        if self.mask is not None:
            hidden = ~self.mask
        elif self.causal:
            hidden = torch.ones(1, 1, s, t, dtype=torch.bool, device=self.q.device).triu_(1 + t - s)
        else:
            return None
        lines = self.q.new_zeros(*hidden.shape[:3], t + -t % multiple)
        return lines[..., :t].masked_fill_(hidden, -torch.inf)


class Kernel(ABC):
    """Attention of a block, forward and backward."""

    cuts = False
    """Whether calls over a few rows at a time are cheap, and reading masks on the host costs no synchronization."""

    @abstractmethod
    def forward(self, block: Block) -> tuple[Tensor, Tensor]:
        """out in q's type and lse in float32 (float64 for float64); 0 and -inf for a query that sees no key."""

    @abstractmethod
    def backward(self, block: Block, grad: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        """dq, dk, dv from the final out and lse, in the inputs' type or wider."""

    def rows(self, q: Tensor, causal: bool, backward: bool) -> int:
        """How many of the queries q (b, n, s, d) a call should take at a time."""
        return q.shape[2]

    def scratch(self, q: Tensor, k: Tensor, causal: bool) -> int:
        """Bytes that backward takes besides its results, where that is more than a little."""
        return 0


class Math(Kernel):
    """The formulas in plain operations, on any device and in any type; all s · t scores exist at once."""

    def forward(self, block: Block) -> tuple[Tensor, Tensor]:
        q, k, v = block.q, block.k, block.v
        scores = _wide(_fold(q * block.scale, k) @ k.mT)  # (b, k, n/k·s, t)
        self._hide(scores, block, -torch.inf)
        lse = scores.logsumexp(-1, keepdim=True)
        out = scores.sub_(_finite(lse)).exp_().to(v.dtype) @ v  # (b, k, n/k·s, d)
        return _unfold(out, q), _unfold(lse, q).squeeze(-1)

    def backward(self, block: Block, grad: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        q, k, v = block.q, block.k, block.v
        total = _wide(grad * out).sum(-1, keepdim=True)  # (b, n, s, 1)
        scaled, grad = _fold(q * block.scale, k), _fold(grad, k)  # (b, k, n/k·s, d)
        p = _wide(scaled @ k.mT).sub_(_fold(_finite(lse.unsqueeze(-1)), k)).exp_()  # (b, k, n/k·s, t)
        self._hide(p, block, 0)
        dv = p.to(q.dtype).mT @ grad  # (b, k, t, d)
        ds = _wide(grad @ v.mT).sub_(_fold(total, k)).mul_(p).to(q.dtype)  # (b, k, n/k·s, t)
        return _unfold(ds @ k, q) * block.scale, ds.mT @ scaled, dv

    @staticmethod
    def _hide(scores: Tensor, block: Block, value: float) -> None:
        """Overwrite what must not be seen in (b, k, n/k·s, t)."""
        grouped = _grouped(scores, block.q)  # (b, k, n/k, s, t)
        if block.causal:  # all of it is in the last s columns
            s = block.q.shape[2]
            above = torch.ones(s, s, dtype=torch.bool, device=scores.device).triu_(1)
            grouped[..., -s:].masked_fill_(above, value)
        elif block.mask is not None:
            grouped.masked_fill_(~block.mask.unsqueeze(2), value)


class CpuFlash(Kernel):
    """torch's flash attention for CPUs, which takes grouped queries as they are.

    It works on 512 keys at a time, hidden or not, so a short causal sequence is faster in runs of rows with the keys each
    can see. Its backward in bf16 is slower than plain matrix products where the processor has them in bf16.
    """

    cuts = True

    def rows(self, q: Tensor, causal: bool, backward: bool) -> int:
        b, n, s, _ = q.shape
        if backward and self._products(q.dtype):
            return max(64, (1 << 20) // (b * n * s))  # keeps the scores in the cache
        if causal and s < 2048 and b * n * s * s > 1 << 19:  # what saves more than the calls cost
            return max(64, s // 8)
        return s

    def scratch(self, q: Tensor, k: Tensor, causal: bool) -> int:
        sums = 2 * 4 * k.numel()  # of dk and dv over tiles, in float32
        if not self._products(q.dtype):
            return sums
        b, n, s, d = q.shape
        rows = b * n * min(s, self.rows(q, causal, backward=True))
        # Scores and their gradients in float32, one of them in bf16 as well; the queries, scaled, and the output's gradients.
        return sums + rows * (10 * k.shape[2] + 4 * d)

    def forward(self, block: Block) -> tuple[Tensor, Tensor]:
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            block.q, block.k, block.v, 0.0, **self._options(block)
        )
        return (out, lse) if block.mask is None else _blind(block.mask, out, lse)

    def backward(self, block: Block, grad: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        if self._products(block.q.dtype):
            return MATH.backward(block, grad, out, lse)
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, block.q, block.k, block.v, out, lse, 0.0, **self._options(block)
        )

    @staticmethod
    def _products(dtype: torch.dtype) -> bool:
        return dtype == torch.bfloat16 and torch.cpu._is_avx512_bf16_supported()

    @staticmethod
    def _options(block: Block) -> dict[str, object]:
        native = block.causal and block.q.shape[2] == block.k.shape[2]  # its own mask is for squares
        return {
            "is_causal": native,
            "attn_mask": None if native else block.bias(),
            "scale": block.scale,
        }


class CudaFlash(Kernel):
    """torch's FlashAttention-2 in half precision without a mask, else its memory-efficient attention. Both take a causal
    block only as a square.
    """

    def forward(self, block: Block) -> tuple[Tensor, Tensor]:
        q, k, v, s = block.q, block.k, block.v, block.q.shape[2]
        if self._flash(block):
            out, lse, *_ = _aten._scaled_dot_product_flash_attention(
                q, k, v, 0.0, block.causal, scale=block.scale
            )
            return out, lse
        k, v = _expand(k, q), _expand(v, q)
        out, lse, *_ = _aten._scaled_dot_product_efficient_attention(
            q, k, v, self._bias(block), True, 0.0, block.causal, scale=block.scale
        )
        lse = lse[:, :, :s]  # it comes padded
        return (out, lse) if block.mask is None else _blind(block.mask, out, lse)

    def backward(self, block: Block, grad: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        q, k, v, s, t = block.q, block.k, block.v, block.q.shape[2], block.k.shape[2]
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
        if self._flash(block):
            return _aten._scaled_dot_product_flash_attention_backward(
                *(grad, q, k, v, out, lse.contiguous(), None, None, s, t, 0.0, block.causal),
                *(no_dropout, no_dropout),
                scale=block.scale,
            )
        seed = torch.zeros((), dtype=torch.int64, device=q.device)
        padded = F.pad(lse, (0, -s % 32), value=torch.inf)  # as forward gave it
        dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
            *(grad, q, _expand(k, q), _expand(v, q), self._bias(block), out, padded, seed, seed, 0.0),
            *([True, True, True, False], block.causal),
            scale=block.scale,
        )
        return dq, *(x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (dk, dv))

    @staticmethod
    def _flash(block: Block) -> bool:
        q, d = block.q, block.q.shape[-1]
        return block.mask is None and q.dtype in (torch.bfloat16, torch.float16) and d % 8 == 0 and d <= 256

    @staticmethod
    def _bias(block: Block) -> Tensor | None:
        return None if block.mask is None else block.bias(8).expand(-1, block.q.shape[1], -1, -1)


MATH = Math()
_kernels: dict[str, Kernel] = {"math": MATH, "cpu-flash": CpuFlash(), "cuda-flash": CudaFlash()}
_absent = {"nki": "AWS's NKI flash attention, which the package that brings it registers with register()"}


def register(name: str, kernel: Kernel) -> None:
    """Give a kernel a name, for packages that bring a device's own."""
    _kernels[name] = kernel


def kernel(name: str) -> Kernel:
    """The kernel of this name.

    Raises:
        ValueError: an unknown name.
        RuntimeError: a known one that nothing here provides.
    """
    if name in _kernels:
        return _kernels[name]
    if name in _absent:
        raise RuntimeError(
            f"attention kernel {name!r} is absent: {_absent[name]}; kernel='math' works anywhere"
        )
    raise ValueError(f"attention kernel {name!r} is not one of {', '.join([*_kernels, *_absent])}")


def default(x: Tensor) -> str:
    """Name of the kernel of the device that x lies on."""
    if x.is_meta:
        return "cpu-flash"  # nothing is computed there; what is kept is the same with every flash kernel
    kind = device.KINDS.get(x.device.type)
    return kind.attention if kind else "math"


def present(name: str) -> Kernel | None:
    """The kernel of this name, None where it is absent."""
    return _kernels.get(name)


def cuts(name: str) -> bool:
    """`Kernel.cuts` of the kernel of this name, False where it is absent."""
    return name in _kernels and _kernels[name].cuts


def _wide(x: Tensor) -> Tensor:
    """At least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _finite(lse: Tensor) -> Tensor:
    """lse with its -inf (no key seen) made finite: exp(-inf - finite) is 0, exp(-inf + inf) is not a number."""
    return lse.clamp_min(torch.finfo(lse.dtype).min)


def _blind(mask: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """What flash kernels leave open: 0 and -inf for queries that see no key."""
    blind = ~mask.any(-1)  # (b, 1, s)
    return out.masked_fill(blind[..., None], 0), lse.masked_fill(blind, -torch.inf)


def _fold(x: Tensor, k: Tensor) -> Tensor:
    """(b, n, s, ·) -> (b, k, n/k·s, ·): the queries of one KV head as rows of one matrix."""
    return x.unflatten(1, (k.shape[1], -1)).flatten(2, 3)


def _unfold(x: Tensor, q: Tensor) -> Tensor:
    """(b, k, n/k·s, ·) -> (b, n, s, ·)."""
    return _grouped(x, q).flatten(1, 2)


def _grouped(x: Tensor, q: Tensor) -> Tensor:
    """(b, k, n/k·s, ·) -> (b, k, n/k, s, ·)."""
    return x.unflatten(2, (-1, q.shape[2]))


def _expand(x: Tensor, q: Tensor) -> Tensor:
    """(b, k, t, d) -> (b, n, t, d): each KV head once for each of its query heads."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)
