"""Reference for attention tests: the dense formula in float64, and inputs drawn from a seed."""

from dataclasses import dataclass

import torch

from parallel.attention.ring import zigzag_positions


def dense(q, k, v, causal=True, documents=None, scale=None):
    """softmax(scale · q kᵀ) v of q (b, n, s, d) and k, v (b, k, s, d), materializing all scores."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))  # (b, n, s, d)
    s = q.shape[2]
    seen = torch.ones(s, s, dtype=torch.bool).tril() if causal else torch.ones(s, s, dtype=torch.bool)
    if documents is not None:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
    scores = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v


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

    def document_indices(self):
        """Document index of each token (b, s), or None."""
        if self.documents is None:
            return None
        lengths = torch.tensor(self.documents)
        rows = [torch.arange(len(lengths)).repeat_interleave(lengths.roll(row)) for row in range(self.b)]
        return torch.stack(rows)

    def expected(self):
        """out, dq, dk, dv in float64."""
        q, k, v, grad = (x.double() for x in self.tensors())
        inputs = [x.requires_grad_() for x in (q, k, v)]
        out = dense(*inputs, self.causal, self.document_indices(), self.scale)
        return [out.detach(), *torch.autograd.grad(out, inputs, grad)]

    def tolerance(self):
        """Allowed relative error norm for the dtype."""
        return {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 1.5e-2}[self.dtype]


def zigzag_split(x, size, rank, dim):
    """The shard of x that a rank of the context axis holds: (..., s, ...) -> (..., s/c, ...)."""
    return x.index_select(dim, zigzag_positions(x.shape[dim], size, rank).to(x.device))


def zigzag_merge(shards, dim):
    """Inverse of `zigzag_split`, from all ranks' shards in rank order."""
    x = torch.cat(shards, dim)
    positions = [zigzag_positions(x.shape[dim], len(shards), rank) for rank in range(len(shards))]
    return x.index_select(dim, torch.cat(positions).argsort().to(x.device))


def error(found, expected):
    """Relative norm of the difference."""
    return ((found.double() - expected).norm() / expected.norm()).item()
