"""torch's 1F1B pipelining, one stage per rank.

Run with `torchrun --nproc-per-node 2 -m benchmarks.training_steps.torch_pipeline`.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.harness import workload
from benchmarks.training_steps.llama import Llama, cross_entropy
from profiles.sections.base import required


class Stage(nn.Module):
    """A rank's share of the layers; the first rank also has the embedding, the last one the head."""

    def __init__(self, model: Llama, rank: int, ranks: int) -> None:
        super().__init__()
        count = len(model.model.layers) // ranks
        self.layers = model.model.layers[rank * count : (rank + 1) * count]
        self.embedding = model.model.embed_tokens if rank == 0 else nn.Identity()
        self.head = nn.Sequential(model.model.norm, model.lm_head) if rank == ranks - 1 else nn.Identity()
        self.cos, self.sin = model.cos, model.sin

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.head(x)


def main() -> None:
    options, work, rank, ranks = workload.start(workload.workload_parser(__doc__))
    model = Llama(work.model)
    workload.load_initial_weights(model, work.model)
    module = Stage(model, rank, ranks)
    stage = PipelineStage(module, rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=work.batch, loss_fn=cross_entropy)
    optimizer = workload.adamw(module.parameters())

    def step(samples: Tensor) -> Tensor:
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(samples[:, :-1])
        else:
            schedule.step(target=samples[:, 1:], losses=losses)
        clip_gradients(module)
        optimizer.step()
        optimizer.zero_grad()
        loss = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.broadcast(loss, src=ranks - 1)
        return loss

    workload.measure(step, options)


def clip_gradients(module: nn.Module) -> None:
    """Clip gradients by their norm over all stages."""
    gradients = [required(parameter.grad) for parameter in module.parameters()]
    square = torch.nn.utils.get_total_norm(gradients).square()
    dist.all_reduce(square)
    torch.nn.utils.clip_grads_with_norm_(module.parameters(), workload.CLIP, square.sqrt())


if __name__ == "__main__":
    main()
