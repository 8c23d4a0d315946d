"""Hugging Face's LlamaForCausalLM in a plain training loop, one process, eager or compiled."""

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness import workload
from benchmarks.peers.llama import cross_entropy
from profiles.huggingface.config import to_config_json


def main() -> None:
    options, work, _, _ = workload.start(workload.workload_parser(__doc__))
    config = LlamaConfig.from_dict({**to_config_json(work.model), "use_cache": False})
    model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
    workload.load_initial_weights(model, work.model)
    model.to(options.device, workload.DTYPES[options.precision]).train()
    forward = torch.compile(model) if options.graphs else model

    def compute_loss(samples: Tensor) -> Tensor:
        samples = samples.to(options.device)
        return cross_entropy(forward(input_ids=samples[:, :-1]).logits, samples[:, 1:])

    workload.measure_training(model, workload.adamw(model.parameters()), compute_loss, options)


if __name__ == "__main__":
    main()
