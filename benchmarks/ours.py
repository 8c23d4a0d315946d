"""Our library on the work, spread as the arguments say: torchrun --nproc-per-node 2 -m benchmarks.ours --tensor 2

It goes the way of the training trainer: a profile is made into a `Trainer` and an optimizer.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import work
from modeling.models.weight_names import huggingface_tensor
from modeling.training.train import make_optimizer
from modeling.training.trainer import Trainer
from parallel.layout import layout_of
from profiles.schema import Profile


def main() -> None:
    options = parser().parse_args()
    _, ranks = work.begin(options)
    settings = profile(options, ranks)
    trainer = Trainer(settings, Path(options.graphs) if options.graphs else None, start=False)
    fill(trainer, work.weights(work.WORKS[options.work]))
    optimizer = make_optimizer(trainer)
    rank, ranks = trainer.mesh.data.rank, trainer.mesh.data.size
    scale = 1 / work.WORKS[options.work].tokens

    def step(samples: Tensor) -> Tensor:
        own = samples.chunk(ranks)[rank] if trainer.reads_samples else None
        optimizer.begin_step(settings.accumulation_steps)
        loss = trainer.forward_backward(own, scale)
        optimizer.step(settings.train.learning_rate)
        return trainer.sum(loss[None])[0]

    work.measure(step, options)


def parser() -> argparse.ArgumentParser:
    made = work.parser(__doc__)
    for axis in ("tensor", "pipeline", "context"):
        made.add_argument(f"--{axis}", type=int, default=1, help="degree; data takes what is left over")
    made.add_argument("--sequence-parallel", action="store_true")
    return made


def profile(options: argparse.Namespace, ranks: int) -> Profile:
    """The run as a profile; a pipeline takes one sample a microbatch, all else a rank's samples at once."""
    size = work.WORKS[options.work]
    data = ranks // (options.tensor * options.pipeline * options.context)
    return Profile.model_validate(
        {
            "name": "benchmark",
            "model": size.model,
            "tokenizer": {"source": "train"},
            "data": {"sources": [{"kind": "python-docs"}]},
            "parallel": {
                "tensor": options.tensor,
                "pipeline": options.pipeline,
                "context": options.context,
                "sequence_parallel": options.sequence_parallel,
            },
            "train": {
                "steps": options.warm_up + options.steps,
                "global_batch_size": size.batch,
                "micro_batch_size": 1 if options.pipeline > 1 else size.batch // data,
                "sequence_length": size.sequence,
                "learning_rate": work.ADAMW["lr"],
                "betas": work.ADAMW["betas"],
                "epsilon": work.ADAMW["eps"],
                "weight_decay": work.ADAMW["weight_decay"],
                "norm_weight_decay": True,
                "clip": work.CLIP,
                "precision": options.precision,
            },
            "cluster": {"device": options.device, "devices_per_node": ranks, "threads": options.threads},
        }
    )


@torch.no_grad()
def fill(trainer: Trainer, initial: dict[str, Tensor]) -> None:
    """Give this rank's pieces of the model the initial weights, which have Hugging Face's names."""
    for name, parameter in trainer.named_parameters():
        for box in layout_of(parameter).boxes(name, trainer.mesh.tensor.rank):
            whole = initial[huggingface_tensor("llama", box.name).name]
            box.view(parameter).copy_(whole[box.index()])


if __name__ == "__main__":
    main()
