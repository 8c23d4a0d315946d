"""DDP with ZeroRedundancyOptimizer, or, on each rank, torch.optim.Muon for matrices and AdamW.

Run with `torchrun --nproc-per-node 2 -m benchmarks.training_steps.ddp`.
"""

import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness import workload
from benchmarks.training_steps.llama import Llama, cross_entropy


class Muon:
    """Muon and AdamW, each for some of a model's parameters."""

    def __init__(self, model: nn.Module) -> None:
        blocks = [parameter for name, parameter in model.named_parameters() if ".layers." in name]
        matrices = [parameter for parameter in blocks if parameter.dim() > 1]
        chosen = {*map(id, matrices)}
        rest = [parameter for parameter in model.parameters() if id(parameter) not in chosen]
        self.members = torch.optim.Muon(matrices, **workload.MUON), workload.adamw(rest)

    def step(self) -> None:
        for optimizer in self.members:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.members:
            optimizer.zero_grad()


def main() -> None:
    parser = workload.workload_parser(__doc__)
    parser.add("--muon", "torch.optim.Muon on each rank")
    options, work, rank, ranks = workload.start(parser)
    llama = Llama(work.model)
    workload.load_initial_weights(llama, work.model)
    model = DistributedDataParallel(llama, forward_sync_buffers=False)
    optimizer: workload.Optimizer
    if options.muon:
        optimizer = Muon(llama)
    else:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **workload.ADAMW)

    def compute_loss(samples: Tensor) -> Tensor:
        local = samples.chunk(ranks)[rank]
        return cross_entropy(model(local[:, :-1]), local[:, 1:])

    workload.measure_training(model, optimizer, compute_loss, options, workload.mean_over_ranks)


if __name__ == "__main__":
    main()
