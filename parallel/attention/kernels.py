"""Attention kernels for blocks of queries and keys, with the log-sum-exp for merging and backward.

    scores = scale · q kᵀ;   lse = log Σ exp(scores);   out = exp(scores - lse) v

Given lse over all keys rather than only the block's, backward returns the block's share of the full gradient:

    p = exp(scores - lse);   dv = pᵀ do;   ds = p ∘ (do vᵀ - rowsum(do ∘ out));   dq = scale · ds k;   dk = scale · dsᵀ q

(FlashAttention-2, arXiv 2307.08691). With a soft cap c, as in Gemma 2 (arXiv 2408.00118), scores are c · tanh(scores / c), and ds
is multiplied by 1 - (scores / c)²; only the formulas, `Math`, and FlexAttention (flex.py) have it.

Implementations of `Kernel` are registered by name; device.py names each device's default. Kernels of other packages are entry
points (`load`). If a device's default is not installed, `Math` is used, the formulas.

Shapes: q, out (b, n, s, d); k, v (b, k, t, d), n a multiple of k; lse (b, n, s).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib import metadata
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel import device
from parallel.torch_internals import (
    cpu_flash_attention,
    cpu_flash_attention_backward,
    efficient_attention,
    efficient_attention_backward,
    flash_attention,
    flash_attention_backward,
    has_bf16_products,
)

Gradients = tuple[Tensor, Tensor, Tensor]
HALF = torch.bfloat16, torch.float16
MULTIPROCESSORS = 132  # of H100 and H200, for plans


@dataclass(frozen=True)
class KernelInput:
    """Input of a kernel: queries, keys, values and which keys each query sees.

    With `mask` (b or 1, 1, s, t), those where it is True; with `causal`, those up to its own position, aligning the last query
    with the last key (s <= t); otherwise all. `mask` and `causal` are mutually exclusive.

    Attributes:
        bounds: in place of a mask, for kernels that accept bounds: the first key that each query sees and one past its last,
            (b, s) each.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    causal: bool
    scale: float
    bounds: tuple[Tensor, Tensor] | None = None

    def bias(self, multiple: int = 1) -> Tensor | None:
        """Additive mask (b or 1, 1, s, t) in q's dtype, None if every query sees all keys.

        Args:
            multiple: row stride alignment, in elements.
        """
        s, t = self.q.shape[2], self.k.shape[2]
        if self.mask is not None:
            hidden = ~self.mask
        elif self.causal:
            hidden = torch.ones(1, 1, s, t, dtype=torch.bool, device=self.q.device).triu_(1 + t - s)
        else:
            return None
        rows = self.q.new_zeros(*hidden.shape[:3], t + -t % multiple)
        return rows[..., :t].masked_fill_(hidden, -torch.inf)


class Kernel(ABC):
    """Attention of a block, forward and backward."""

    supports_tiling = False
    """Whether calls on a few rows are cheap and reading masks on the host costs no synchronization."""
    takes_bounds = False
    """Whether documents and windows are given as `KernelInput.bounds` instead of a mask; a document's tokens must then be
    contiguous and their indices ascend, as in packed samples."""
    uses_flex = False
    """Whether attention with documents, a window or sinks runs as FlexAttention instead (flex.py)."""

    @abstractmethod
    def forward(self, inputs: KernelInput) -> tuple[Tensor, Tensor]:
        """out in q's dtype and lse in float32 (float64 for float64); 0 and -inf for queries that see no key."""

    @abstractmethod
    def backward(self, inputs: KernelInput, grad: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        """dq, dk, dv from the final out and lse, in the inputs' dtype or wider."""

    def tile_rows(self, q: Tensor, causal: bool, backward: bool) -> int:
        """Number of rows of the queries q (b, n, s, d) to process in one call."""
        return q.shape[2]

    def scratch_bytes(self, q: Tensor, k: Tensor, causal: bool) -> int:
        """Temporary memory of backward in bytes, if significant."""
        return 0


class Math(Kernel):
    """The formulas in plain operators, on any device and in any dtype; materializes all scores of a block.

    Args:
        soft_cap: limit of the scores' magnitude; None: none.
    """

    def __init__(self, soft_cap: float | None = None) -> None:
        self.soft_cap = soft_cap

    def tile_rows(self, q: Tensor, causal: bool, backward: bool) -> int:
        return min(q.shape[2], 512)

    def scores(self, inputs: KernelInput) -> Tensor:
        """Scores of all queries of each KV head, -inf where masked, (b, k, n/k·s, t)."""
        scores = self._scores(_fold(inputs.q * inputs.scale, inputs.k), inputs.k)
        self._hide(scores, inputs, -torch.inf)
        return scores

    def max_scores(self, inputs: KernelInput) -> Tensor:
        """Largest score of each query head, (n)."""
        return _grouped(self.scores(inputs), inputs.q).amax((0, 3, 4)).flatten()

    def forward(self, inputs: KernelInput) -> tuple[Tensor, Tensor]:
        q, v, scores = inputs.q, inputs.v, self.scores(inputs)
        lse = scores.logsumexp(-1, keepdim=True)
        out = scores.sub_(_finite(lse)).exp_().to(v.dtype) @ v  # (b, k, n/k·s, d)
        return _unfold(out, q), _unfold(lse, q).squeeze(-1)

    def backward(self, inputs: KernelInput, grad: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        q, k, v = inputs.q, inputs.k, inputs.v
        total = _wide(grad * out).sum(-1, keepdim=True)  # (b, n, s, 1)
        scaled, grad = _fold(q * inputs.scale, k), _fold(grad, k)  # (b, k, n/k·s, d)
        scores = self._scores(scaled, k)  # (b, k, n/k·s, t)
        slope = None if self.soft_cap is None else 1 - (scores / self.soft_cap).square()
        p = scores.sub_(_fold(_finite(lse.unsqueeze(-1)), k)).exp_()
        self._hide(p, inputs, 0)
        dv = p.to(q.dtype).mT @ grad  # (b, k, t, d)
        ds = _wide(grad @ v.mT).sub_(_fold(total, k)).mul_(p)  # (b, k, n/k·s, t)
        ds = (ds if slope is None else ds.mul_(slope)).to(q.dtype)
        return _unfold(ds @ k, q) * inputs.scale, ds.mT @ scaled, dv

    def scratch_bytes(self, q: Tensor, k: Tensor, causal: bool) -> int:
        """With a soft cap, whose operators no plan sees: four float32 tensors of a tile, and two copies."""
        if self.soft_cap is None:
            return 0
        b, n, *_ = q.shape
        rows = b * n * self.tile_rows(q, causal, backward=True)
        return rows * k.shape[2] * (16 + 2 * q.element_size()) + 8 * k.numel()

    def _scores(self, scaled: Tensor, k: Tensor) -> Tensor:
        """Scores of queries (b, k, n/k·s, d) that are scaled already, without a mask."""
        scores = _wide(scaled @ k.mT)
        return scores if self.soft_cap is None else scores.div_(self.soft_cap).tanh_().mul_(self.soft_cap)

    @staticmethod
    def _hide(scores: Tensor, inputs: KernelInput, value: float) -> None:
        """Overwrite the masked entries of scores (b, k, n/k·s, t)."""
        grouped = _grouped(scores, inputs.q)  # (b, k, n/k, s, t)
        if inputs.causal:  # masked entries are in the last s columns
            s = inputs.q.shape[2]
            above = torch.ones(s, s, dtype=torch.bool, device=scores.device).triu_(1)
            grouped[..., -s:].masked_fill_(above, value)
        elif inputs.mask is not None:
            grouped.masked_fill_(~inputs.mask.unsqueeze(2), value)


class CpuFlash(Kernel):
    """torch's flash attention for CPUs, which supports grouped queries natively.

    It processes 512 keys at a time, masked or not, so tiles of rows with only their visible keys speed up short causal
    sequences. Its bf16 backward is slower than plain matrix products on processors with bf16 products.
    """

    supports_tiling = True

    def tile_rows(self, q: Tensor, causal: bool, backward: bool) -> int:
        b, n, s, _ = q.shape
        if backward and self._has_bf16_products(q.dtype):
            return max(64, (1 << 20) // (b * n * s))  # the scores fit in the cache
        if causal and s < 2048 and b * n * s * s > 1 << 19:  # tiling saves more than the calls cost
            return max(64, s // 8)
        return s

    def scratch_bytes(self, q: Tensor, k: Tensor, causal: bool) -> int:
        sums = 2 * 4 * k.numel()  # dk and dv summed over tiles, float32
        if not self._has_bf16_products(q.dtype):
            return sums
        b, n, s, d = q.shape
        rows = b * n * min(s, self.tile_rows(q, causal, backward=True))
        # Scores and their gradient in float32, one of them in bf16 too; scaled queries and the output's gradient.
        return sums + rows * (10 * k.shape[2] + 4 * d)

    def forward(self, inputs: KernelInput) -> tuple[Tensor, Tensor]:
        out, lse = cpu_flash_attention(inputs.q, inputs.k, inputs.v, 0.0, **self._options(inputs))
        return (out, lse) if inputs.mask is None else _zero_unseen(inputs.mask, out, lse)

    def backward(self, inputs: KernelInput, grad: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        if self._has_bf16_products(inputs.q.dtype):
            return MATH.backward(inputs, grad, out, lse)
        return cpu_flash_attention_backward(
            grad, inputs.q, inputs.k, inputs.v, out, lse, 0.0, **self._options(inputs)
        )

    @staticmethod
    def _has_bf16_products(dtype: torch.dtype) -> bool:
        return dtype == torch.bfloat16 and has_bf16_products()

    @staticmethod
    def _options(inputs: KernelInput) -> dict[str, object]:
        s, t = inputs.q.shape[2], inputs.k.shape[2]
        native = inputs.causal and s == t  # is_causal supports only squares
        if inputs.causal and not native and type(inputs.q) is Tensor:
            bias: Tensor | None = _causal_bias(s, 1 << (t - 1).bit_length(), inputs.q.dtype)[..., -t:]
        else:
            bias = None if native else inputs.bias()
        return {"is_causal": native, "attn_mask": bias, "scale": inputs.scale}


@lru_cache(maxsize=8)
def _causal_bias(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """`KernelInput.bias` of a causal block; the last columns of a wider one are that of a narrower one."""
    hidden = torch.ones(rows, columns, dtype=torch.bool).triu_(1 + columns - rows)
    return torch.zeros(1, 1, rows, columns, dtype=dtype).masked_fill_(hidden, -torch.inf)


class CudaFlash(Kernel):
    """torch's FlashAttention-2 in half precision without a mask, else its memory-efficient attention.

    Both support causal blocks only as squares.
    """

    uses_flex = True

    def scratch_bytes(self, q: Tensor, k: Tensor, causal: bool) -> int:
        """FlashAttention-2's: several float32 sums of dq for a fixed order; dk and dv of each query head."""
        b, n, _, d = q.shape
        sums = -(-MULTIPROCESSORS // (b * n)) * 4 * q.numel()
        return sums + (2 * b * n * k.shape[2] * d * k.element_size() if k.shape[1] < n else 0)

    def forward(self, inputs: KernelInput) -> tuple[Tensor, Tensor]:
        q, k, v, s = inputs.q, inputs.k, inputs.v, inputs.q.shape[2]
        if self._flash(inputs):
            out, lse, *_ = flash_attention(q, k, v, 0.0, inputs.causal, scale=inputs.scale)
            return out, lse
        k, v = _expand(k, q), _expand(v, q)
        out, lse, *_ = efficient_attention(
            q, k, v, self._bias(inputs), True, 0.0, inputs.causal, scale=inputs.scale
        )
        lse = lse[:, :, :s]  # padded by the operator
        return (out, lse) if inputs.mask is None else _zero_unseen(inputs.mask, out, lse)

    def backward(self, inputs: KernelInput, grad: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        q, k, v, s, t = inputs.q, inputs.k, inputs.v, inputs.q.shape[2], inputs.k.shape[2]
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
        if self._flash(inputs):
            return flash_attention_backward(
                *(grad, q, k, v, out, lse.contiguous(), None, None, s, t, 0.0, inputs.causal),
                *(no_dropout, no_dropout),
                scale=inputs.scale,
            )
        if q.dtype in HALF:  # torch 2.11 on an H100: with a mask, dq and dk in bf16 are wrong
            wide = replace(inputs, q=q.float(), k=k.float(), v=v.float())
            return self.backward(wide, grad.float(), out.float(), lse)
        seed = torch.zeros((), dtype=torch.int64, device=q.device)
        padded = F.pad(lse, (0, -s % 32), value=torch.inf)  # as returned by forward
        dq, dk, dv, _ = efficient_attention_backward(
            *(grad, q, _expand(k, q), _expand(v, q), self._bias(inputs), out, padded, seed, seed, 0.0),
            *([True, True, True, False], inputs.causal),
            scale=inputs.scale,
        )
        return dq, *(x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (dk, dv))

    @staticmethod
    def _flash(inputs: KernelInput) -> bool:
        q, d = inputs.q, inputs.q.shape[-1]
        return inputs.mask is None and q.dtype in HALF and d % 8 == 0 and d <= 256

    @staticmethod
    def _bias(inputs: KernelInput) -> Tensor | None:
        bias = None if inputs.mask is None else inputs.bias(8)
        return None if bias is None else bias.expand(*inputs.q.shape[:2], -1, -1)


class Planned(Kernel):
    """For plans and traces, whose tensors have no values: all flash kernels save the same activations."""

    supports_tiling = True

    def forward(self, inputs: KernelInput) -> tuple[Tensor, Tensor]:
        raise RuntimeError("attention was built for a plan, which computes nothing")

    def backward(self, inputs: KernelInput, grad: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        raise RuntimeError("attention was built for a plan, which computes nothing")


MATH, PLANNED = Math(), "planned"
SOFT_CAP = "math, soft cap "  # and its value: name of the formulas with a soft cap
_kernels: dict[str, Kernel] = {
    "math": MATH,
    "cpu-flash": CpuFlash(),
    "cuda-flash": CudaFlash(),
    PLANNED: Planned(),
}
GROUP = "trainshed.attention_kernels"  # entry point group


def register_kernel(name: str, kernel: Kernel) -> None:
    """Register a kernel under a name."""
    _kernels[name] = kernel


def load(name: str) -> str:
    """Register the named kernel from an entry point of GROUP, unless it is registered or there is none.

    The entry point names a subclass of `Kernel`, which is called without arguments.

    Returns:
        the name of the kernel to use: this one, or "math".

    Raises:
        RuntimeError: several packages have a kernel of this name, or it cannot be imported.
        TypeError: the entry point names something else.
    """
    if name not in _kernels:
        kernel = installed(GROUP, name, "attention kernel", Kernel)
        if kernel is not None:
            register_kernel(name, kernel)
    return name if name in _kernels else "math"


def installed(group: str, name: str, what: str, base: type[Any]) -> Any:
    """An instance of the class that an entry point of a group names; None if no package has one.

    Args:
        what: the kind of object, for errors.
        base: that it must be a subclass of.

    Raises:
        RuntimeError: several packages have one of this name, or it cannot be imported.
        TypeError: the entry point names something else.
    """
    found = _entry_points(group, name)
    if len(found) > 1:
        raise RuntimeError(
            f"{what} {name!r}: several entry points of the group {group} have this name, "
            f"{', '.join(sorted(found))}; uninstall all but one of their packages"
        )
    for value, point in found.items():
        try:
            kernel = point.load()
        except (ImportError, AttributeError) as error:
            raise RuntimeError(
                f"{what} {name!r}: its entry point {value} cannot be imported: {error}; remove its package"
            ) from error
        if not (isinstance(kernel, type) and issubclass(kernel, base)):
            raise TypeError(
                f"{what} {name!r}: its entry point {value} is no subclass of {base.__module__}.{base.__name__}"
            )
        return kernel()
    return None


@cache
def _entry_points(group: str, name: str) -> dict[str, metadata.EntryPoint]:
    """Entry points of a group of this name, by the object that they refer to."""
    return {point.value: point for point in metadata.entry_points(group=group, name=name)}


def soft_capped(name: str, soft_cap: float | None) -> str:
    """Name of the kernel to use in place of one without a soft cap: the same if there is no cap."""
    return name if soft_cap is None else f"{SOFT_CAP}{soft_cap}"


def get_kernel(name: str) -> Kernel:
    """The kernel registered under this name, or of `soft_capped`. Raises ValueError: unknown name."""
    if name.startswith(SOFT_CAP):
        return Math(float(name.removeprefix(SOFT_CAP)))
    if name not in _kernels:
        raise ValueError(f"attention kernel {name!r} is not one of {', '.join(_kernels)}")
    return _kernels[name]


def default_kernel(x: Tensor) -> str:
    """Name of the default kernel of x's device; "math" if it is not registered."""
    if x.is_meta:
        return PLANNED
    kind = device.KINDS.get(x.device.type)
    return kind.attention_kernel if kind and kind.attention_kernel in _kernels else "math"


def _wide(x: Tensor) -> Tensor:
    """Convert to float32 or wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _finite(lse: Tensor) -> Tensor:
    """Clamp -inf in lse (no visible key) to a finite minimum: exp(-inf + inf) would be NaN instead of 0."""
    return lse.clamp_min(torch.finfo(lse.dtype).min)


def _zero_unseen(mask: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Set out to 0 and lse to -inf for queries that see no key, which flash kernels leave undefined."""
    unseen = ~mask.any(-1)  # (b, 1, s)
    return out.masked_fill(unseen[..., None], 0), lse.masked_fill(unseen, -torch.inf)


def _fold(x: Tensor, k: Tensor) -> Tensor:
    """(b, n, s, ·) -> (b, k, n/k·s, ·): stack the queries of one KV head as rows of one matrix."""
    return x.unflatten(1, (k.shape[1], -1)).flatten(2, 3)


def _unfold(x: Tensor, q: Tensor) -> Tensor:
    """(b, k, n/k·s, ·) -> (b, n, s, ·)."""
    return _grouped(x, q).flatten(1, 2)


def _grouped(x: Tensor, q: Tensor) -> Tensor:
    """(b, k, n/k·s, ·) -> (b, k, n/k, s, ·)."""
    return x.unflatten(2, (-1, q.shape[2]))


def _expand(x: Tensor, q: Tensor) -> Tensor:
    """(b, k, t, d) -> (b, n, t, d): repeat each KV head for each of its query heads."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)
