"""The plan's bytes against those of real runs: `python -m benchmarks.memory`, about a minute on two cores.

Each case trains two steps on this machine's CPU. Parameters, gradients and optimizer states must be the plan's to the byte; of
all tensors that are alive when most are, on the fullest rank of each stage, the script prints planned over measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity
from torch.profiler import profile as record
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from modeling.planning.planner import plan
from modeling.training.train import make_optimizer
from modeling.training.trainer import Trainer
from profiles import resolve
from profiles.schema import Profile

STEPS = 2
SMALL = (
    *(
        "model.hidden_size=256",
        "model.intermediate_size=704",
        "model.num_hidden_layers=4",
        "model.vocab_size=2048",
    ),
    *("tokenizer.vocabulary_size=2048", "train.sequence_length=256", "compile.enabled=false"),
)
GPT = (
    *("model.architecture=gpt", "model.num_key_value_heads=8", "model.hidden_act=gelu", "model.dropout=0.1"),
    *("model.tie_word_embeddings=true", "model.attention_bias=true", "model.mlp_bias=true"),
)
CASES = {
    "one process": ("parallel.tensor=1", "cluster.devices_per_node=1"),
    "one process, float32": ("parallel.tensor=1", "cluster.devices_per_node=1", "train.precision=float32"),
    "tensor 2": (),
    "tensor 2, full": ("train.recompute=full",),
    "tensor 2, selective": ("train.recompute=selective",),
    "tensor 2, gpt with dropout": GPT,
    "data 2": ("parallel.tensor=1",),
    "context 2": ("parallel.tensor=1", "parallel.context=2"),
    "pipeline 2": ("parallel.tensor=1", "parallel.pipeline=2", "train.micro_batch_size=1"),
    "pipeline 2, interleaved": (
        *("parallel.tensor=1", "parallel.pipeline=2", "train.micro_batch_size=1"),
        "parallel.schedule=interleaved",
    ),
    "pipeline 2 x tensor 2": (
        *("parallel.pipeline=2", "train.micro_batch_size=1", "cluster.devices_per_node=4"),
    ),
}


def measure(overrides: tuple[str, ...]) -> tuple[int, dict[str, int], int]:
    """Train some steps as this rank: its place in the pipeline, bytes of states by kind, most bytes of all tensors alive."""
    profile = case(overrides)
    trainer = Trainer(profile, start=False)
    try:
        optimizer = make_optimizer(trainer)
        states = {
            "parameters": sum(bucket.values.nbytes for bucket in optimizer.buckets),
            "gradients": sum(bucket.gradients.nbytes for bucket in optimizer.buckets),
            "optimizer": sum(
                bucket.exp_avg.nbytes + bucket.exp_avg_sq.nbytes
                + (bucket.master.nbytes if bucket.values.dtype != torch.float32 else 0)
                for bucket in optimizer.buckets
            ),
        }  # fmt: skip
        train = profile.train
        with record(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded, Sent():
            for step in range(STEPS):
                samples = None
                if trainer.reads_samples:
                    size = (train.global_batch_size // trainer.mesh.data.size, train.sequence_length + 1)
                    samples = torch.randint(profile.model.vocab_size, size)
                optimizer.begin_step(profile.accumulation_steps)
                trainer.forward_backward(samples, 1.0, step)
                optimizer.step(1e-3)
        most = _most(recorded)
        return trainer.mesh.pipeline.rank, states, sum(states.values()) + most
    finally:
        trainer.mesh.close()


class Sent(TorchDispatchMode):
    """Keeps what is sent until gloo has let go of it, and no longer: of what its threads give back the profiler sees nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[Tensor] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, inputs: tuple = (), named: dict | None = None
    ) -> Any:
        self._kept = [tensor for tensor in self._kept if tensor._use_count() > 1]
        result = function(*inputs, **(named or {}))
        if function.namespace in ("_c10d_functional", "c10d"):
            self._kept += [each for each in tree_leaves(inputs) if isinstance(each, Tensor)]
        return result


def _most(recorded: record) -> int:
    """The most bytes that were alive at a time."""
    alive: dict[int, int] = {}
    total = most = 0
    events = _leaves(recorded.profiler.kineto_results.experimental_event_tree())
    for event in sorted(events, key=lambda event: event.start_time_ns):
        where, size = event.extra_fields.ptr, event.extra_fields.alloc_size
        total -= alive.pop(where, 0)
        if size > 0:
            alive[where] = size
            total += size
            most = max(most, total)
    return most


def _leaves(events: Iterable[Any]) -> Iterator[Any]:
    """Allocations among events and what is within them."""
    for event in events:
        if event.tag == _EventType.Allocation:
            yield event
        yield from _leaves(event.children)


def case(overrides: tuple[str, ...]) -> Profile:
    """The profile of a case."""
    profile = resolve.load("tiny", [*SMALL, *overrides])
    resolve.check(profile)
    return profile


def main() -> None:
    if len(sys.argv) > 1:
        overrides = tuple(json.loads(sys.argv[1]))
        if case(overrides).world_size > 1:
            dist.init_process_group("gloo")
        print(json.dumps(measure(overrides)), flush=True)
        return
    ratios = []
    for name, overrides in CASES.items():
        profile = case(overrides)
        processes = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(profile.world_size),
            "-m",
        ]
        command = [sys.executable, *processes, "benchmarks.memory", json.dumps(overrides)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        ranks = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
        for place, stage in enumerate(plan(profile).stages):
            states = {kind: size for kind, size in stage.bytes.items() if kind != "activations"}
            measured = max(most for at, found, most in ranks if at == place and found == states)
            ratios.append(stage.total / measured)
            print(
                f"{name:28} stage {place}: {measured / 2**20:6.1f} MiB, planned {ratios[-1]:.2f} of it",
                flush=True,
            )
    print(f"planned / measured: {min(ratios):.2f} to {max(ratios):.2f}; states equal to the byte")


if __name__ == "__main__":
    main()
