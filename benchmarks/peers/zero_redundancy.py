"""torch's DDP with ZeroRedundancyOptimizer: torchrun --nproc-per-node 2 -m benchmarks.peers.zero_redundancy"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks import work
from benchmarks.peers.llama import Llama, cross_entropy


def main() -> None:
    options = work.parser(__doc__).parse_args()
    rank, ranks = work.begin(options)
    size = work.WORKS[options.work]
    model = Llama(size.model)
    work.fill(model, size)
    model = DistributedDataParallel(model, forward_sync_buffers=False)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **work.ADAMW)

    def step(samples: Tensor) -> Tensor:
        own = samples.chunk(ranks)[rank]
        loss = cross_entropy(model(own[:, :-1]), own[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), work.CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return work.mean_over_ranks(loss)

    work.measure(step, options)


if __name__ == "__main__":
    main()
