"""torch.distributed.pipelining, 1F1B, a stage a rank: torchrun --nproc-per-node 2 -m benchmarks.peers.torch_pipeline"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks import work
from benchmarks.peers.llama import Llama, cross_entropy


class Stage(nn.Module):
    """An equal share of a model's layers; with the embedding on the first rank, the head on the last."""

    def __init__(self, whole: Llama, rank: int, ranks: int) -> None:
        super().__init__()
        each = len(whole.model.layers) // ranks
        self.layers = whole.model.layers[rank * each : (rank + 1) * each]
        self.before = whole.model.embed_tokens if rank == 0 else nn.Identity()
        self.after = nn.Sequential(whole.model.norm, whole.lm_head) if rank == ranks - 1 else nn.Identity()
        self.cos, self.sin = whole.cos, whole.sin

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.after(x)


def main() -> None:
    options = work.parser(__doc__).parse_args()
    rank, ranks = work.begin(options)
    size = work.WORKS[options.work]
    whole = Llama(size.model)
    work.fill(whole, size)
    module = Stage(whole, rank, ranks)
    stage = PipelineStage(module, rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=size.batch, loss_fn=cross_entropy)
    optimizer = work.adamw(module.parameters())

    def step(samples: Tensor) -> Tensor:
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(samples[:, :-1])
        else:
            schedule.step(target=samples[:, 1:], losses=losses)
        clip(module)
        optimizer.step()
        optimizer.zero_grad()
        loss = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.broadcast(loss, src=ranks - 1)
        return loss

    work.measure(step, options)


def clip(module: nn.Module) -> None:
    """Scale gradients by their norm over all stages."""
    gradients = [parameter.grad for parameter in module.parameters()]
    square = torch.nn.utils.get_total_norm(gradients).square()
    dist.all_reduce(square)
    torch.nn.utils.clip_grads_with_norm_(module.parameters(), work.CLIP, square.sqrt())


if __name__ == "__main__":
    main()
