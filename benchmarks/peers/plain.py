"""A plain torch Llama on one device, eager or compiled: what a card does without any library of ours."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks import work
from benchmarks.peers.llama import Llama, cross_entropy


def main() -> None:
    options = work.parser(__doc__).parse_args()
    work.begin(options)
    size = work.WORKS[options.work]
    model = Llama(size.model)
    work.fill(model, size)
    model.to(options.device)
    cos, sin = model.cos, model.sin
    model.to(work.DTYPES[options.precision])
    model.cos, model.sin = cos, sin  # angles stay in float32
    optimizer = work.adamw(model.parameters(), fused=True)

    def loss_of(samples: Tensor) -> Tensor:
        return cross_entropy(model(samples[:, :-1]), samples[:, 1:])

    compute = torch.compile(loss_of) if options.graphs else loss_of

    def step(samples: Tensor) -> Tensor:
        loss = compute(samples.to(options.device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), work.CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    work.measure(step, options)


if __name__ == "__main__":
    main()
