"""Attention sinks (GPT-OSS, arXiv 2309.17453): a learned score per query head that joins its softmax.

    p_j = exp(score_j) / (Σ exp(scores) + exp(sink));   out = Σ p_j v_j

A sink is one more key with the value 0, so it is merged like a block of keys into the out and lse of all others, and backward of
the other keys needs only the merged out and lse:

    lse' = log(exp(lse) + exp(sink));   out' = sigmoid(lse - sink) · out;   dsink = -Σ exp(sink - lse') · rowsum(do ∘ out')

Shapes: sinks (n), out (b, n, s, d), lse (b, n, s).
"""

from __future__ import annotations

import torch
from torch import Tensor


def merge_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> None:
    """Merge the sinks, if any, into out and lse in place; lse must be finite."""
    if sinks is not None:
        scores = sinks.to(lse.dtype)[:, None]  # (n, 1)
        out.mul_(torch.sigmoid(lse - scores)[..., None])
        torch.logaddexp(lse, scores, out=lse)


def sink_gradient(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor | None:
    """Gradient (n) of the sinks from the merged out and lse and from out's gradient; None without sinks."""
    if sinks is None:
        return None
    share = (sinks.to(lse.dtype)[:, None] - lse).exp()  # (b, n, s)
    return -(share * (grad * out).sum(-1, dtype=lse.dtype)).sum((0, 2)).to(sinks.dtype)
