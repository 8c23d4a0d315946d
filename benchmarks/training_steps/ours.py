"""Trainshed on the workload: torchrun --nproc-per-node 2 -m benchmarks.training_steps.ours --tensor 2

Builds the `Trainer` and the optimizer from a profile, as a training run does.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.harness import workload
from modeling.data.prefetch import Batch
from modeling.training.train import make_optimizer
from modeling.training.trainer import Trainer
from parallel import ShardedAdamW
from parallel.device import Mark
from profiles.arguments import Parser
from profiles.schema import Profile


def main() -> None:
    options, work, _, ranks = workload.start(parser())
    profile = make_profile(options, ranks)
    trainer = Trainer(profile, Path(options.graphs) if options.graphs else None)
    optimizer = make_optimizer(trainer)
    if not options.lora_rank:
        load_initial_weights(trainer, optimizer)
    data = trainer.mesh.data
    updates: list[tuple[Mark, Mark]] = []

    def step(samples: Tensor) -> Tensor:
        local = Batch(samples.chunk(data.size)[data.rank]) if trainer.reads_samples else Batch()
        optimizer.begin_step(profile.accumulation_steps)
        loss = trainer.forward_backward(local, 1 / work.tokens)
        optimizer.reduce()
        begin = trainer.device.mark()
        optimizer.step(profile.train.learning_rate)
        if options.wait_for_weights:
            optimizer.wait_for_parameters()
        updates.append((begin, trainer.device.mark()))
        return trainer.sum(loss[None])

    workload.measure(step, options, updates)


def parser() -> Parser:
    parser = workload.workload_parser(__doc__)
    for axis in ("tensor", "pipeline", "context"):
        parser.add(f"--{axis} N", "degree; the remaining ranks are data-parallel", type=int, default=1)
    help_text = "degree: data-parallel ranks that the experts are divided among"
    parser.add("--expert N", help_text, type=int, default=1)
    parser.add("--sequence-parallel", "shard activations between layers too")
    parser.add("--overlap-chunks N", "chunks that overlap with collectives (default: by size)", type=int)
    parser.add("--async-tensor", "fuse matrix products with collectives (cuda)")
    parser.add("--fp8", "compute the blocks' matrix products in FP8 (rowwise)")
    parser.add("--deterministic", "use deterministic kernels only, as runs do by default")
    parser.add_argument("--data-sharding", choices=("none", "zero1", "fsdp"), default="zero1")
    parser.add_argument("--shard-degree", type=int, help="ranks over which states are sharded (HSDP)")
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw")
    help_text = "of Newton–Schulz steps (default: torch's)"
    parser.add_argument("--muon-dtype", choices=workload.DTYPES, default="bf16", help=help_text)
    help_text = (
        "end an update, also in its time, when the weights are gathered, instead of beside the next forward"
    )
    parser.add("--wait-for-weights", help_text)
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="none")
    parser.add("--lora-rank N", "train updates of this rank; the other weights are drawn", type=int)
    return parser


def make_profile(options: argparse.Namespace, ranks: int) -> Profile:
    """The options as a profile; a microbatch is one sample with a pipeline, else all samples of a rank."""
    work = workload.WORKLOADS[options.workload]
    data = ranks // (options.tensor * options.pipeline * options.context)
    axes = (
        *("tensor", "pipeline", "context", "expert"),
        *("sequence_parallel", "data_sharding", "overlap_chunks", "shard_degree"),
    )
    return Profile.model_validate(
        {
            "name": "benchmark",
            "model": work.model,
            "tokenizer": {"source": "train"},
            "data": {"sources": [{"kind": "python-docs"}]},
            "parallel": {name: getattr(options, name) for name in axes},
            "train": {
                "steps": options.warm_up + options.steps,
                "global_batch_size": work.batch,
                "micro_batch_size": 1 if options.pipeline > 1 else work.batch // data,
                "sequence_length": work.sequence,
                "optimizer": options.optimizer,
                "muon_momentum": workload.MUON["momentum"],
                "muon_dtype": options.muon_dtype,
                "learning_rate": workload.ADAMW["lr"],
                "betas": workload.ADAMW["betas"],
                "epsilon": workload.ADAMW["eps"],
                "weight_decay": workload.ADAMW["weight_decay"],
                "norm_weight_decay": True,
                "clip": workload.CLIP,
                "balance": "none",
                "precision": "fp8" if options.fp8 else options.precision,
                "deterministic": options.deterministic,
                "recompute": options.recompute,
            },
            "lora": {"rank": options.lora_rank},
            "compile": {"enabled": bool(options.graphs), "async_tensor": options.async_tensor},
            "cluster": {"device": options.device, "devices_per_node": ranks, "threads": options.threads},
        }
    )


@torch.no_grad()
def load_initial_weights(trainer: Trainer, optimizer: ShardedAdamW) -> None:
    """Load this rank's shards of the initial weights into the optimizer's master weights and the model."""
    weights = workload.initial_weights(trainer.profile.model, trainer.torch_device)
    for box, states in optimizer.state_boxes():
        states["master"].copy_(weights[box.name][box.index()])
    optimizer.gather_parameters()


if __name__ == "__main__":
    main()
