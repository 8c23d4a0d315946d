"""Hugging Face's model in a plain training loop, one process, eager or compiled."""

import torch
import transformers
from torch import Tensor

from benchmarks.harness import workload
from benchmarks.training_steps.llama import cross_entropy
from profiles.huggingface.config import to_config_json

EXPERTS = ("eager", "batched_mm", "grouped_mm")


def main() -> None:
    parser = workload.workload_parser(__doc__)
    parser.add_argument("--experts", choices=EXPERTS, help="implementation of experts")
    options, work, _, _ = workload.start(parser)
    model_class = getattr(transformers, work.model.family.huggingface)
    config = model_class.config_class.from_dict({**to_config_json(work.model), "use_cache": False})
    drawn = workload.huggingface_weights(work.model, options.device)
    weights = {name: weight.cpu() for name, weight in drawn.items()}
    model = model_class.from_pretrained(None, config=config, state_dict=weights, attn_implementation="sdpa")
    if options.experts:
        model.set_experts_implementation(options.experts)
    workload.convert(model, options)
    model.train()
    forward = torch.compile(model) if options.graphs else model

    def compute_loss(samples: Tensor) -> Tensor:
        samples = samples.to(options.device)
        return cross_entropy(forward(input_ids=samples[:, :-1]).logits, samples[:, 1:])

    workload.measure_training(model, workload.adamw(model.parameters()), compute_loss, options)


if __name__ == "__main__":
    main()
