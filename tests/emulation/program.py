"""Runs training on the emulated device, on each rank of a forked job: `tests.emulation.program JOB`.

JOB is a JSON file: [{run, dataset, calls, fault, kernel}, ...]. Each entry is a run folder whose profile has as many ranks as
this job; its calls are made in order, in one process group, but "compile" by rank 0 alone and without one. Each rank writes what
each call returned, what it did on the device, and the settings that the device had read, to RUN/calls_RANK.json. A `fault` breaks
the program on purpose. No attention kernel is installed for the device, unless `kernel` is "bounds": then one that takes bounds.
With `gpu`, the program is told that the device runs operators as a GPU does, so that it takes the paths for GPUs: blocks are
compiled and the rest is not, attention is a ring, FSDP gathers in hooks, and experts without a capacity exchange rows unevenly.
"""

from __future__ import annotations

import json
import os
import shutil
import tarfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from modeling.check_device import checks
from modeling.compilation import manifest
from modeling.compilation.compilers import Compiled, Compiler, make_compiler
from modeling.compilation.graph_cache import CACHE, RegionBackends, program_name
from modeling.compilation.manifest import Captured, Manifest, region_digest
from modeling.models.build import partition_layers
from modeling.planning import measure
from modeling.supervision import stragglers
from modeling.tracing.trace import run_stage
from modeling.training import evaluate, generate, train
from modeling.training.trainer import Trainer
from parallel import collectives, device, torch_internals
from parallel.attention import kernels
from parallel.layers import overlap
from parallel.optimizer import buckets
from profiles.resolve import load
from tests.emulation import process_group, usage
from tests.emulation.compiler import compiled_lines, register_compiler
from tests.emulation.device import host_alias, install, queue_work
from tests.modeling import micro
from tests.parallel.attention.reference import Bounds
from tests.profiles.pair import PAIR

FORWARD_BACKWARD = Trainer.forward_backward
SLOW_SECONDS = 1000.0
GPU = {
    "compiles_operators": False,
    "gathers_in_graph": False,
    "reduces_in_place": True,
    "concurrent_collectives": True,
    "attention_kernel": "math",
}
# With kernels that the check's own profile lacks: experts of static shapes, keys gathered over ranks, and products in FP8.
KERNEL_PROFILES = {
    "tiny-moe": [
        *("train.capacity_factor=1.25", "parallel.context=2", "cluster.device=neuron"),
        "cluster.devices_per_node=2",
    ],
    PAIR: ["train.precision=fp8", "model.head_dim=32"],
}


def run_training(run: Path, dataset: Path) -> object:
    """Train; RUN/weights, if any, has the initial weights, and RUN/ahead is the graphs artifact."""
    given = ["--reference", str(dataset)] if (dataset / "reference.npz").exists() else []
    given += ["--weights", str(run / "weights")] if (run / "weights").exists() else []
    return train.main(["--run-folder", str(run), "--dataset", str(dataset), *given, *compiled_ahead(run)])


def compiled_ahead(run: Path) -> list[str]:
    """The option for RUN/ahead, if there is one."""
    return ["--graphs", str(run / "ahead")] if (run / "ahead").exists() else []


def run_steps(run: Path, dataset: Path) -> object:
    """Train with the emulated compiler; counts from the second step on, when everything has been compiled.

    Returns:
        number of the optimizer's buckets by rule; the programs in the cache; operators outside compiled programs before those
        steps, and after the last was queued, when a checkpoint may be saved; number of programs that were traced to compare them
        with the manifest.
    """
    register_compiler()
    torch.compiler.reset()  # programs of other runs count towards torch's limit of recompilations
    queue_step = train.TrainingRun._queue_step

    def queue(training: train.TrainingRun) -> None:
        if training.step == 2:
            before.update(usage.take().get(usage.EAGER, {}))
        queue_step(training)
        if training.step == training.settings.steps:
            used.update(usage.take())
            buckets.update(type(bucket.rule).__name__ for bucket in training.optimizer.buckets)

    used: dict[str, Any] = {}
    buckets, before = Counter[str](), Counter[str]()
    with (
        few_new_tokens(),
        mock.patch.object(train.TrainingRun, "_queue_step", queue),
        mock.patch.object(manifest, "capture", wraps=manifest.capture) as traced,
    ):
        run_training(run, dataset)
    after_last_step = usage.take().get(usage.EAGER, {})
    usage.counts.update(used)
    programs = neffs(run / "graphs")
    outside = {"before": before, "after": after_last_step}
    return {"buckets": buckets, "programs": programs, "traced": traced.call_count, **outside}


def compile_ahead(run: Path, dataset: Path) -> object:
    """Compile a run's programs without a device, into RUN/ahead; before a process group exists.

    As `tasks.steps.graphs` does, but traces each stage once for all programs.
    """
    register_compiler()
    profile, folder = load(str(run / "profile.yaml")), run / "ahead"
    torch.compiler.reset()
    programs = AllPrograms(make_compiler(profile))
    with mock.patch.object(usage, "present", False), mock.patch.dict(os.environ):
        programs.compiler.use_cache(run / "cache", ahead_of_time=True)
        for number in range(len(partition_layers(profile))):
            run_stage(profile, number, programs.backend, torch_internals.FakeTensorMode())
    folder.mkdir()
    Manifest.of(programs.captured).write(folder)
    with tarfile.open(folder / CACHE, "w") as tar:
        tar.add(run / "cache", arcname=".")
    return neffs(run / "cache")


class AllPrograms(RegionBackends):
    """torch.compile backends that compile each program ahead of time."""

    def __init__(self, compiler: Compiler) -> None:
        super().__init__()
        self.compiler = compiler
        self.captured: list[Captured] = []

    def _compile(self, region: str, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        name = program_name(region)
        digest = region_digest(name, graph, inputs)
        compiled_lines.clear()
        with torch_internals.unset_fake_temporarily():
            self.compiler.compile(graph, inputs)
        self.captured.append(Captured(name, digest, tuple(compiled_lines)))
        return graph.forward


def neffs(folder: Path) -> list[str]:
    """The compiled programs in a cache folder."""
    return sorted(path.name for path in folder.rglob("*.neff"))


def run_with_slow_device(run: Path, dataset: Path) -> object:
    """Train with a device of rank 1 that takes long for each microbatch, which costs its host no time."""
    last_stage = Trainer._last_stage

    def slow(trainer: Trainer, *inputs: torch.Tensor) -> torch.Tensor:
        queue_work(SLOW_SECONDS if trainer.mesh.rank == 1 else 0)
        return last_stage(trainer, *inputs)

    with mock.patch.object(Trainer, "_last_stage", slow), mock.patch.object(stragglers, "WINDOW", 2):
        return run_training(run, dataset)


def run_evaluation(run: Path, dataset: Path) -> object:
    """Evaluate; returns the programs in the cache."""
    output, ahead = ["--output", str(run / "evaluation.json")], compiled_ahead(run)
    with few_new_tokens() if ahead else nullcontext():
        evaluate.main(["--run-folder", str(run), "--dataset", str(dataset), *output, *ahead])
    return neffs(run / "graphs")


def few_new_tokens() -> AbstractContextManager[object]:
    """Generated samples have two tokens in the block, the second after one that was generated."""
    return mock.patch.object(generate, "NEW_TOKENS", 2)


def resume_training(run: Path, dataset: Path) -> object:
    """Resume a run without its last checkpoint.

    Returns:
        on rank 0, its losses, and the checksums of the last checkpoint's files before and after.
    """
    last, found = run / "checkpoints" / f"step_{max(micro.losses(run))}", []
    if dist.get_rank() == 0:
        found.append(checksums(last))
        shutil.rmtree(last)
    dist.barrier()  # until it is removed
    run_training(run, dataset)
    return (micro.losses(run), *found, checksums(last)) if dist.get_rank() == 0 else None


def checksums(checkpoint: Path) -> dict[str, Any]:
    """Of the files with weights and optimizer states, by rank: names begin with an id of the attempt."""
    files = json.loads((checkpoint / "complete.json").read_text())["files"]
    return {name.partition("_")[2]: sums for name, sums in files.items() if name.endswith(".distcp")}


def check_devices(run: Path, dataset: Path) -> object:
    """Run check_device's checks and a calibration at small sizes; they start the process group themselves.

    On rank 1 only the checks that need several ranks run.
    """
    register_compiler()
    words = {}
    kind = type(device.NEURON)
    start, seconds = kind.start_process_group, measure._seconds

    def start_once(
        self: device.Device, *arguments: Any, **options: Any
    ) -> None:  # each check starts separate processes
        if not dist.is_initialized():
            start(self, *arguments, **options)

    def at_least_a_second(*arguments: Any) -> float:
        """A product that keeps the device busy while calls are queued; thousands of short ones would as well."""
        measured = seconds(*arguments)
        assert measured > 0
        return max(1.0, measured)

    with (
        mock.patch.object(kind, "start_process_group", start_once),
        mock.patch.object(checks, "_elements", return_value=1 << 10),
        mock.patch.object(checks, "STEPS", 2),  # the second loss depends on an update
        mock.patch.object(measure, "BUSY", 64),
        mock.patch.object(measure, "ROUNDS", 1),
        mock.patch.object(measure, "_seconds", at_least_a_second),
        mock.patch.object(measure.fastest, "__defaults__", (2,)),  # calls that are queued
    ):
        first = os.environ["RANK"] == "0"
        for check in (
            *((checks.check_kernels, checks.check_training) if first else ()),
            *((checks.check_compilation,) if first else ()),
            checks.check_parallel_training,  # the first that starts the group, after the CPU's losses
            checks.check_collectives,
            checks.measure_links,
        ):
            usage.settings.clear()
            result = check("neuron")
            assert result.passed, result.measured
            words[check.__name__] = result.measured
            if check is checks.check_compilation:
                words["settings"] = dict(usage.settings)
        if not first:
            return words
        local = device.NEURON.set_current()
        sizes = (32,), (32, 64), (32,), (128, 32), 256
        table = measure.calibrate(device.NEURON, local, "trn2", sizes, compiled=True)
    words["calibrate"] = sorted(table.products)
    for name, settings in KERNEL_PROFILES.items():
        result = checks.check_kernels("neuron", load(name, settings))
        assert result.passed, result.measured
        words[name] = result.measured
    return words


CALLS: dict[str, Callable[[Path, Path], object]] = {
    "train": run_training,
    "slow": run_with_slow_device,
    "steps": run_steps,
    "evaluate": run_evaluation,
    "resume": resume_training,
    "check_device": check_devices,
    "compile": compile_ahead,
}


def all_reduce_on_host(x: torch.Tensor, axis: Any) -> torch.Tensor:
    return x if axis.size == 1 else collectives.PendingAllReduce(x.cpu(), axis).wait().to(x.device)


FAULTS: dict[str, Callable[[], Any]] = {
    "no wait for collectives": lambda: mock.patch.object(collectives, "wait", lambda tensor: tensor),
    "no wait for a chunk": lambda: mock.patch.object(
        overlap, "collectives", SimpleNamespace(**{**vars(collectives), "wait": lambda tensor: tensor})
    ),
    "no wait for the copy to the host": lambda: mock.patch.object(
        device.Download, "wait", lambda self: self.host
    ),
    "host tensors in collectives": lambda: mock.patch.object(
        train.ShardedAdamW, "_square_norm", lambda self, _: all_reduce_on_host(torch.zeros((), device="neuron"), self.mesh.world)
    ),
}  # fmt: skip


def queue(trainer: Trainer, *args: Any, **kwargs: Any) -> torch.Tensor:
    loss = FORWARD_BACKWARD(trainer, *args, **kwargs)
    usage.order.append("queue")
    return loss


def call(name: str, run: Path, dataset: Path, fault: str | None) -> dict[str, Any]:
    usage.take()
    usage.settings.clear()
    usage.order.clear()
    process_group.groups.clear()
    try:
        with (
            FAULTS[fault]() if fault else mock.MagicMock(),
            mock.patch.object(Trainer, "forward_backward", queue),
        ):
            returned, error = CALLS[name](run, dataset), None
    except Exception:
        if not fault:
            raise
        returned, error = None, traceback.format_exc()
    return {
        "name": name, "returned": returned, "error": error, "settings": dict(usage.settings), "usage": usage.take(),
        "order": [*usage.order],
        "groups": [(group.getGroupName(), group.used, group.timeout.total_seconds()) for group in process_group.groups],
    }  # fmt: skip


def resize_storage(flat: torch.Tensor, size: int) -> None:
    if size == 0 and not isinstance(flat, FakeTensor):
        host_alias(flat).fill_(torch.nan)


@contextmanager
def as_gpu() -> Iterator[None]:
    """The program takes its paths for GPUs in the block."""
    with (
        mock.patch.dict(device.KINDS, neuron=replace(device.KINDS["neuron"], **GPU)),
        mock.patch.object(process_group, "uneven", True),
    ):
        yield


def main(arguments: list[str]) -> int:
    install()
    # Backends in Python cannot resize a storage; memory that would be freed becomes NaN.
    buckets.resize_storage = resize_storage
    torch.set_num_threads(1)
    for entry in json.loads(Path(arguments[0]).read_text()):
        run, dataset = Path(entry["run"]), Path(entry["dataset"])
        kernels._kernels.pop("nki", None)
        if entry.get("kernel") == "bounds":
            kernels.register_kernel("nki", Bounds())
        made = []
        for name in entry["calls"]:
            if name == "compile" and os.environ["RANK"] != "0":
                continue
            if name not in ("check_device", "compile") and not dist.is_initialized():
                device.NEURON.start_process_group(device.NEURON.set_current())
            with as_gpu() if entry.get("gpu") else nullcontext():
                made.append(call(name, run, dataset, entry.get("fault")))
        (run / f"calls_{os.environ['RANK']}.json").write_text(json.dumps(made))
    dist.destroy_process_group()
    return 0
