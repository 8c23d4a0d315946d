"""Plain torch Llama on one device, eager or compiled."""

import torch
from torch import Tensor

from benchmarks.harness import workload
from benchmarks.peers.llama import Llama, cross_entropy


def main() -> None:
    options, work, _, _ = workload.start(workload.workload_parser(__doc__))
    model = Llama(work.model)
    workload.load_initial_weights(model, work.model)
    model.to(options.device)
    cos, sin = model.cos, model.sin
    model.to(workload.DTYPES[options.precision])
    model.cos, model.sin = cos, sin  # rotary tables stay in float32

    def compute_loss(samples: Tensor) -> Tensor:
        return cross_entropy(model(samples[:, :-1]), samples[:, 1:])

    compute = torch.compile(compute_loss) if options.graphs else compute_loss
    optimizer = workload.adamw(model.parameters(), fused=True)
    workload.measure_training(model, optimizer, lambda samples: compute(samples.to(options.device)), options)


if __name__ == "__main__":
    main()
