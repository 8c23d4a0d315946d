"""torch's own ring attention, balanced, over two ranks: torchrun --nproc-per-node 2 -m benchmarks.peers.torch_ring

torch's `context_parallel` has no rule for the CPU's attention kernel, so its ring is called here with that kernel, keys
and values un-replicated. It shifts by all-to-all, which is the faster of its two ways.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_ring
from torch.nn.parallel import DistributedDataParallel

from benchmarks import work
from benchmarks.peers.llama import Llama, cross_entropy

SEQUENCE = 2  # the dim of q, k and v
aten = torch.ops.aten


class Ring(Function):
    """Causal attention of q (b, n, s/c, d) and k, v (b, k, s/c, d), spread as `positions` says."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = torch_ring._templated_ring_attention(
            dist.group.WORLD, SEQUENCE, kernel, q, k, v, is_causal=True
        )
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        gradients = torch_ring._templated_ring_attention_backward(
            dist.group.WORLD,
            SEQUENCE,
            kernel_backward,
            grad.contiguous(),
            "grad_out",
            *ctx.saved_tensors,
            is_causal=True,
        )
        return gradients[:3]


def kernel(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, **_: Any) -> tuple[Tensor, Tensor]:
    return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal)


def kernel_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    is_causal: bool,
    **_: Any,
) -> tuple[Tensor, ...]:
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, query, key, value, out, logsumexp, 0.0, is_causal
    )


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return Ring.apply(q.contiguous(), k.contiguous(), v.contiguous())


def positions(sequence: int, rank: int, ranks: int) -> Tensor:
    """A rank's tokens: one run from the front and its mirror image from the back."""
    runs = torch.arange(sequence).view(2 * ranks, -1)
    return runs[[rank, 2 * ranks - 1 - rank]].flatten()


def main() -> None:
    options = work.parser(__doc__).parse_args()
    rank, ranks = work.begin(options)
    size = work.WORKS[options.work]
    torch_ring.set_rotate_method("alltoall")
    own = positions(size.sequence, rank, ranks)
    model = Llama(size.model, own, attend)
    work.fill(model, size)
    model = DistributedDataParallel(model, broadcast_buffers=False)  # each rank has its own rotary tables
    optimizer = work.adamw(model.parameters())

    def step(samples: Tensor) -> Tensor:
        loss = cross_entropy(model(samples[:, own]), samples[:, own + 1])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), work.CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return work.mean_over_ranks(loss)

    work.measure(step, options)


if __name__ == "__main__":
    main()
