"""Compare planned memory with real runs on this machine's CPU; takes about a minute on two cores.

Each case trains two steps. Parameters, gradients and optimizer states must equal the plan to the byte. Prints the planned peak of
all live tensors over the measured one, on the fullest rank of each stage.
"""

import json
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

from benchmarks.harness.processes import Script, run_script
from benchmarks.harness.results import Results
from benchmarks.harness.timing import make_parser
from modeling.data.prefetch import Batch
from modeling.planning.planner import plan
from modeling.training.train import make_optimizer
from modeling.training.trainer import Trainer
from profiles import resolve
from profiles.schema import Profile

STEPS = 2
SMALL = (
    *("model.hidden_size=256", "model.intermediate_size=704", "model.num_hidden_layers=4"),
    *("model.vocab_size=2048", "tokenizer.vocabulary_size=2048", "train.sequence_length=256"),
    *("model.num_attention_heads=8", "parallel.tensor=2", "cluster.devices_per_node=2"),
    *("train.global_batch_size=8", "train.micro_batch_size=4"),
    "compile.enabled=false",
)
GPT = (
    *("model.architecture=gpt", "model.num_key_value_heads=8", "model.hidden_act=gelu", "model.dropout=0.1"),
    *("model.tie_word_embeddings=true", "model.attention_bias=true", "model.mlp_bias=true"),
)
HYBRID = (
    *("model.architecture=qwen3_5", "model.full_attention_every=4", "model.linear_num_key_heads=2"),
    *("model.linear_num_value_heads=4", "model.linear_key_head_dim=64", "model.linear_value_head_dim=64"),
    *("model.linear_conv_kernel_dim=4", "model.partial_rotary_factor=0.25"),
)
SINGLE = ("parallel.tensor=1", "cluster.devices_per_node=1")
FSDP = ("parallel.data_sharding=fsdp", "train.micro_batch_size=2")
PIPELINE = ("parallel.pipeline=2", "train.micro_batch_size=1")
CASES = {
    "one process": SINGLE,
    "one process, float32": (*SINGLE, "train.precision=float32"),
    "tensor 2": (),
    "tensor 2, full": ("train.recompute=full",),
    "tensor 2, selective": ("train.recompute=selective",),
    "tensor 2, gpt with dropout": GPT,
    "one process, hybrid": (*HYBRID, *SINGLE),
    "tensor 2, hybrid": HYBRID,
    "context 2, hybrid, selective": (
        *(*HYBRID, "parallel.tensor=1", "parallel.context=2", "train.recompute=selective"),
    ),
    "tensor 2, muon": ("train.optimizer=muon",),
    "data 2": ("parallel.tensor=1",),
    "fsdp 2": ("parallel.tensor=1", *FSDP),
    "fsdp 2, float32": ("parallel.tensor=1", *FSDP, "train.precision=float32"),
    "fsdp 2, weights kept": ("parallel.tensor=1", *FSDP, "parallel.keep_gathered=true"),
    "fsdp 2, muon": ("parallel.tensor=1", *FSDP, "train.optimizer=muon"),
    "context 2": ("parallel.tensor=1", "parallel.context=2"),
    "pipeline 2": ("parallel.tensor=1", *PIPELINE),
    "pipeline 2, interleaved": ("parallel.tensor=1", *PIPELINE, "parallel.schedule=interleaved"),
    "pipeline 2 x tensor 2": (*PIPELINE, "cluster.devices_per_node=4"),
}


def main() -> None:
    parser = make_parser(__doc__, out="memory")
    help_text = "measure these overrides (JSON list) as one rank"
    parser.add("overrides OVERRIDES", help_text, nargs="?", type=json.loads)
    options = parser.parse_args()
    if options.overrides is not None:
        if case(options.overrides).world_size > 1:
            dist.init_process_group("gloo")
        print(json.dumps(measure(options.overrides)), flush=True)
        return
    ratios, results = [], Results(options.out)
    for name, overrides in CASES.items():
        profile = case(overrides)
        output = run_script(Script("memory", (json.dumps(overrides),), profile.world_size))
        ranks = [json.loads(line) for line in output.splitlines() if line.startswith("[")]
        for number, stage in enumerate(plan(profile).stages):
            planned = {kind: size for kind, size in stage.bytes.items() if kind != "activations"}
            measured = max(peak for rank, states, peak in ranks if rank == number and states == planned)
            ratios.append(stage.total / measured)
            text = f"{name:28} stage {number}: {measured / 2**20:6.1f} MiB, planned {ratios[-1]:.2f} of it"
            results.add(name, text, stage=number, measured=measured, planned=stage.total)
    print(f"planned / measured: {min(ratios):.2f} to {max(ratios):.2f}; states equal to the byte")


def case(overrides: Iterable[str]) -> Profile:
    """The profile of a case."""
    profile = resolve.load("tiny", [*SMALL, *overrides])
    resolve.check(profile)
    return profile


def measure(overrides: Iterable[str]) -> tuple[int, dict[str, int], int]:
    """Train as this rank; returns pipeline rank, state bytes by kind, and peak bytes of all live tensors."""
    profile = case(overrides)
    trainer = Trainer(profile)
    try:
        optimizer = make_optimizer(trainer)
        buckets = optimizer.buckets
        states = {
            "parameters": sum(bucket.values.untyped_storage().nbytes() for bucket in buckets),
            "gradients": sum((bucket.gradients if bucket.resident else bucket.gradient_shard).nbytes for bucket in buckets),
            "optimizer": sum(
                held.nbytes for bucket in buckets for state, held in bucket.states.items()
                if not (state == "master" and bucket.shares_master)
            ),
        }  # fmt: skip
        train = profile.train
        with (
            record(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
            CommunicationBuffers(),
        ):
            for step in range(STEPS):
                samples = None
                if trainer.reads_samples:
                    size = (train.global_batch_size // trainer.mesh.data.size, train.sequence_length + 1)
                    samples = torch.randint(profile.model.vocab_size, size)
                optimizer.begin_step(profile.accumulation_steps)
                trainer.forward_backward(Batch(samples), 1.0, step)
                optimizer.step(1e-3)
        return trainer.mesh.pipeline.rank, states, sum(states.values()) + _peak_bytes(profiler)
    finally:
        trainer.mesh.close()


class CommunicationBuffers(TorchDispatchMode):
    """Holds tensors until gloo releases them: the profiler misses deallocations in gloo's threads."""

    def __init__(self) -> None:
        super().__init__()
        self._buffers: list[Any] = []  # tensors, whose count of references has no type

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._buffers = [tensor for tensor in self._buffers if tensor._use_count() > 1]
        result = function(*args, **(kwargs or {}))
        if function.namespace in ("_c10d_functional", "c10d"):
            self._buffers += [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        return result


def _peak_bytes(profiler: record) -> int:
    """Peak of allocated bytes."""
    live: dict[int, int] = {}
    total = peak = 0
    measured: Any = profiler.profiler
    events = _allocations(measured.kineto_results.experimental_event_tree())
    for event in sorted(events, key=lambda event: event.start_time_ns):
        address, size = event.extra_fields.ptr, event.extra_fields.alloc_size
        total -= live.pop(address, 0)
        if size > 0:
            live[address] = size
            total += size
            peak = max(peak, total)
    return peak


def _allocations(events: Iterable[Any]) -> Iterator[Any]:
    """Allocation events, recursively."""
    for event in events:
        if event.tag == _EventType.Allocation:
            yield event
        yield from _allocations(event.children)


if __name__ == "__main__":
    main()
