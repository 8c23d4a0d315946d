"""Hugging Face's LlamaForCausalLM in a plain training loop on one process, eager or compiled."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import work
from benchmarks.peers.llama import cross_entropy
from profiles.model import to_config_json


def main() -> None:
    options = work.parser(__doc__).parse_args()
    work.begin(options)
    size = work.WORKS[options.work]
    config = LlamaConfig.from_dict({**to_config_json(size.model), "use_cache": False})
    model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
    work.fill(model, size)
    model.to(options.device, work.DTYPES[options.precision]).train()
    forward = torch.compile(model) if options.graphs else model
    optimizer = work.adamw(model.parameters())

    def step(samples: Tensor) -> Tensor:
        samples = samples.to(options.device)
        loss = cross_entropy(forward(input_ids=samples[:, :-1]).logits, samples[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), work.CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    work.measure(step, options)


if __name__ == "__main__":
    main()
