"""Reference for attention tests: the dense formula in float64, and inputs drawn from a seed."""

from dataclasses import dataclass, replace

import torch

from parallel.attention import kernels


def dense(q, k, v, sinks=None, causal=True, documents=None, scale=None, window=None, soft_cap=None):
    """Dense softmax(scale · q kᵀ) v of q (b, n, s, d) and k, v (b, k, s, d); sinks (n) have no value."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))  # (b, n, s, d)
    s = q.shape[2]
    seen = torch.ones(s, s, dtype=torch.bool).tril() if causal else torch.ones(s, s, dtype=torch.bool)
    if window is not None:
        seen = seen.triu(1 - window)
    if documents is not None:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
    scores = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(*scores.shape[:3], 1)), -1)
    return scores.softmax(-1)[..., :s] @ v


@dataclass(frozen=True)
class Case:
    """A test case: b sequences of s tokens, n query and k KV heads of size d."""

    b: int = 1
    n: int = 4
    k: int = 2
    s: int = 32
    d: int = 8
    causal: bool = True
    documents: tuple[int, ...] | None = None  # lengths, rotated by one for each sequence of the batch
    dtype: torch.dtype = torch.float32
    scale: float | None = None
    window: int | None = None
    sinks: bool = False
    soft_cap: float | None = None
    seed: int = 0

    def tensors(self):
        """q, k, v and the output's gradient, as transposed views of (b, s, heads, d)."""
        draw = torch.Generator().manual_seed(self.seed)
        return [
            torch.randn(self.b, self.s, heads, self.d, generator=draw, dtype=torch.float64)
            .to(self.dtype)
            .transpose(1, 2)
            for heads in (self.n, self.k, self.k, self.n)
        ]

    def sink_scores(self):
        """Sinks (n), or nothing, as a list."""
        draw = torch.Generator().manual_seed(self.seed + 1)
        return [torch.randn(self.n, generator=draw, dtype=torch.float64).to(self.dtype)] if self.sinks else []

    def options(self):
        """Arguments of attention besides tensors."""
        capped = {} if self.soft_cap is None else {"soft_cap": self.soft_cap}
        return {"causal": self.causal, "scale": self.scale, "window": self.window, **capped}

    def document_indices(self):
        """Document index of each token (b, s), or None."""
        if self.documents is None:
            return None
        lengths = torch.tensor(self.documents)
        rows = [torch.arange(len(lengths)).repeat_interleave(lengths.roll(row)) for row in range(self.b)]
        return torch.stack(rows)

    def expected(self):
        """out, dq, dk, dv and dsinks, if there are any, in float64."""
        *inputs, grad = (x.double() for x in self.tensors())
        inputs = [x.double().requires_grad_() for x in (*inputs, *self.sink_scores())]
        out = dense(*inputs, documents=self.document_indices(), **self.options())
        return [out.detach(), *torch.autograd.grad(out, inputs, grad)]

    def tolerance(self):
        """Allowed relative error norm for the dtype."""
        return {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 1.5e-2}[self.dtype]


def error(found, expected):
    """Relative norm of the difference."""
    return ((found.double() - expected).norm() / expected.norm()).item()


class Bounds(kernels.Math):
    """Stand-in for a kernel with bounds, such as AWS's NKI flash attention: the formula with their mask."""

    takes_bounds = True

    @staticmethod
    def _masked(block):
        assert block.mask is None
        if block.bounds is None:
            return block
        low, high = (bound[:, None, :, None] for bound in block.bounds)
        keys = torch.arange(block.k.shape[2], device=block.k.device)
        return replace(block, mask=(low <= keys) & (keys < high), causal=False)

    def forward(self, block):
        return super().forward(self._masked(block))

    def backward(self, block, grad, out, lse):
        return super().backward(self._masked(block), grad, out, lse)
