"""torch's load-balanced ring attention for context parallelism.

Run with `torchrun --nproc-per-node 2 -m benchmarks.training_steps.torch_ring`. torch's `context_parallel` does not support the
CPU's attention kernel, so its ring is called here with that kernel, without replicating keys and values. It rotates shards by
all-to-all, the faster of its two methods.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_ring
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness import workload
from benchmarks.training_steps.llama import Llama, cross_entropy
from profiles.sections.base import required

SEQUENCE = 2  # the dim of q, k and v
aten = torch.ops.aten


class Ring(Function):
    """Causal attention of q (b, n, s/c, d) and k, v (b, k, s/c, d), sharded by `local_positions`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = required(dist.group.WORLD)
        out, lse = torch_ring._templated_ring_attention(group, SEQUENCE, kernel, q, k, v, is_causal=True)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        group, (q, k, v, out, lse) = required(dist.group.WORLD), ctx.saved_tensors
        given = grad.contiguous(), "grad_out", q, k, v, out, lse
        return torch_ring._templated_ring_attention_backward(group, SEQUENCE, kernel_backward, *given, True)[
            :3
        ]


def kernel(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, ...]:
    return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, options["is_causal"])


def kernel_backward(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, ...]:
    grad, out, logsumexp = (options[name] for name in ("grad_out", "out", "logsumexp"))
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, out, logsumexp, 0.0, options["is_causal"]
    )


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return Ring.apply(q.contiguous(), k.contiguous(), v.contiguous())


def local_positions(sequence: int, rank: int, ranks: int) -> Tensor:
    """A rank's tokens: one chunk from the start and its mirror image from the end."""
    chunks = torch.arange(sequence).view(2 * ranks, -1)
    return chunks[[rank, 2 * ranks - 1 - rank]].flatten()


def main() -> None:
    options, work, rank, ranks = workload.start(workload.workload_parser(__doc__))
    torch_ring.set_rotate_method("alltoall")
    local = local_positions(work.sequence, rank, ranks)
    model = Llama(work.model, local, attend)
    workload.load_initial_weights(model, work.model)
    # Each rank has its own rotary tables.
    synchronized = DistributedDataParallel(model, broadcast_buffers=False)

    def compute_loss(samples: Tensor) -> Tensor:
        return cross_entropy(synchronized(samples[:, local]), samples[:, local + 1])

    optimizer = workload.adamw(synchronized.parameters())
    workload.measure_training(synchronized, optimizer, compute_loss, options, workload.mean_over_ranks)


if __name__ == "__main__":
    main()
