"""torch's FSDP2 on each block and the model, eager or with compiled blocks and loss.

Run with `torchrun --nproc-per-node 2 -m benchmarks.training_steps.fsdp2`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.harness import workload
from benchmarks.training_steps.llama import Llama, cross_entropy


def main() -> None:
    options, work, rank, ranks = workload.start(workload.workload_parser(__doc__))
    with torch.device(options.device):
        model = Llama(work.model)
    workload.load_initial_weights(model, work.model)
    dtype = workload.DTYPES[options.precision]
    sharding: dict[str, Any] = {
        "mesh": init_device_mesh(options.device, (ranks,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
    }
    for block in model.model.layers:
        fully_shard(block, **sharding)
    fully_shard(model, reshard_after_forward=False, **sharding)
    compute = cross_entropy
    if options.graphs:
        for block in model.model.layers:  # without the hooks that gather its weights
            block.forward = torch.compile(block.forward, fullgraph=True, dynamic=False)
        compute = torch.compile(cross_entropy, dynamic=False)
    optimizer = workload.adamw(model.parameters())

    def compute_loss(samples: Tensor) -> Tensor:
        local = samples.chunk(ranks)[rank].to(options.device)
        return compute(model(local[:, :-1]), local[:, 1:])

    workload.measure_training(model, optimizer, compute_loss, options, workload.mean_over_ranks)


if __name__ == "__main__":
    main()
