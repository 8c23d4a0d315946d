"""DDP with ZeroRedundancyOptimizer.

Run with `torchrun --nproc-per-node 2 -m benchmarks.training_steps.zero_redundancy`.
"""

import torch
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness import workload
from benchmarks.training_steps.llama import Llama, cross_entropy


def main() -> None:
    options, work, rank, ranks = workload.start(workload.workload_parser(__doc__))
    llama = Llama(work.model)
    workload.load_initial_weights(llama, work.model)
    model = DistributedDataParallel(llama, forward_sync_buffers=False)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **workload.ADAMW)

    def compute_loss(samples: Tensor) -> Tensor:
        local = samples.chunk(ranks)[rank]
        return cross_entropy(model(local[:, :-1]), local[:, 1:])

    workload.measure_training(model, optimizer, compute_loss, options, workload.mean_over_ranks)


if __name__ == "__main__":
    main()
