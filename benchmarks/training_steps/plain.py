"""Plain torch Llama on one device, eager or compiled, in FP8 with torchao."""

import torch
from torch import Tensor

from benchmarks.harness import workload
from benchmarks.training_steps.llama import Llama, cross_entropy


def main() -> None:
    parser = workload.workload_parser(__doc__)
    parser.add_argument("--fp8", action="store_true", help="torchao's rowwise float8 training of the blocks")
    options, work, _, _ = workload.start(parser)
    with torch.device(options.device):
        model = Llama(work.model)
    workload.load_initial_weights(model, work.model)
    workload.convert(model, options)

    if options.fp8:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        recipe = Float8LinearConfig.from_recipe_name("rowwise")
        convert_to_float8_training(
            model, config=recipe, module_filter_fn=lambda _, name: ".layers." in f".{name}"
        )

    def compute_loss(samples: Tensor) -> Tensor:
        return cross_entropy(model(samples[:, :-1]), samples[:, 1:])

    compute = torch.compile(compute_loss) if options.graphs else compute_loss
    optimizer = workload.adamw(model.parameters(), fused=True)
    workload.measure_training(model, optimizer, lambda samples: compute(samples.to(options.device)), options)


if __name__ == "__main__":
    main()
