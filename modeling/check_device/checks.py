"""Checks of a device, from a matrix product to training on all devices, each in its own processes.

Results are compared with the CPU in float32 or with the vendor's published figures.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from modeling.check_device import kernel_check, kernel_errors
from modeling.compilation import compilers
from modeling.data.prefetch import Batch
from modeling.planning.measure import fastest, llama_profile
from modeling.training.train import make_optimizer
from modeling.training.trainer import Trainer
from parallel import collectives
from parallel import device as devices
from parallel.mesh import Mesh
from profiles.schema import Profile

TOLERANCES = {precision: kernel_check.TOLERANCES[precision] for precision in ("float32", "bf16")}
STEPS = 5
MAX_SPLIT = 8  # ranks over which training is split in a way; further ranks are data-parallel
# In which training is split over devices.
WAYS: tuple[str, ...] = ("tensor", "context", "pipeline", "data", "fsdp")


@dataclass(frozen=True)
class Result:
    """Result of a check: its measurement as text, and whether that is as expected."""

    measured: str
    passed: bool = True


@dataclass(frozen=True)
class Check:
    """One check of the device."""

    name: str  # what is checked
    expected: str  # the expected result
    run: Callable[..., Result]  # called in each process with the device type
    all_devices: bool = False  # whether it runs on all devices of the machine instead of one
    takes_profile: bool = False  # whether it also accepts a profile, whose shapes it checks


def check_matrix_products(kind: str) -> Result:
    """FLOP/s of matrix products in each precision, compared with the published peak."""
    device, local = local_device(kind)
    size = 1024 if kind == "cpu" else 8192
    measured = []
    for precision, dtype in (("float32", torch.float32), ("bf16", torch.bfloat16)):
        a, b = (torch.randn(size, size, device=local).to(dtype) for _ in range(2))
        rate = 2 * size**3 / fastest(device, partial(torch.matmul, a, b))
        peak = device.peak(precision)
        share = f" ({rate / peak:.0%} of peak)" if peak else ""
        measured.append(f"{precision} {rate / 1e12:.3g} TFLOP/s{share}")
    return Result(", ".join(measured))


def check_memory_bandwidth(kind: str) -> Result:
    """Bandwidth of copies in device memory, compared with the published bandwidth."""
    device, local = local_device(kind)
    size = (1 << 28) if kind == "cpu" else (1 << 30)
    x = torch.zeros(size, dtype=torch.uint8, device=local)
    y = torch.empty_like(x)
    rate = 2 * size / fastest(device, lambda: y.copy_(x))
    share = f" ({rate / device.bandwidth:.0%} of the published)" if device.bandwidth else ""
    return Result(f"{rate / 1e9:.3g} GB/s read and written{share}")


def check_kernels(kind: str, profile: Profile | None = None) -> Result:
    """Compare the kernels that a profile trains with, on its shapes, with float32 on the CPU."""
    device, local = local_device(kind)
    profile = profile or _profile(kind, "bf16", 1)
    device.choose_kernels(profile.train.deterministic, profile.train.precision)
    kernels = kernel_errors.kernels_of(profile)
    results = [kernel.check(local) for kernel in kernels]
    return Result("; ".join(measured for measured, _ in results), all(passed for _, passed in results))


def check_training(kind: str) -> Result:
    """Losses of a few steps of a small Llama in each precision, compared with the CPU's in float32."""
    expected = _losses(_profile("cpu", "float32", 1))
    losses = {precision: _losses(_profile(kind, precision, 1)) for precision in TOLERANCES}
    return _within_tolerance({precision: _error(actual, expected) for precision, actual in losses.items()})


def check_compilation(kind: str) -> Result:
    """Compiled losses compared with eager ones; seconds to compile, and to start again from the cache."""
    profile = _profile(kind, "float32", 1)
    with tempfile.TemporaryDirectory(prefix="trainshed-check-") as folder:
        compiler = compilers.make_compiler(profile)
        if reason := compiler.missing_requirement() or compiler.fault(Path(folder)):
            return Result(reason, passed=False)
        compiler.use_cache(Path(folder))  # before anything runs on the device
        expected = _losses(profile)
        seconds = []
        for _ in range(2):
            torch.compiler.reset()
            start = time.perf_counter()
            actual = _losses(profile, Path(folder))
            seconds.append(time.perf_counter() - start)
    error = _error(actual, expected)
    measured = f"{error:.1e}; {seconds[0]:.1f} s, again {seconds[1]:.1f} s"
    return Result(measured, error <= TOLERANCES["float32"])


def check_collectives(kind: str) -> Result:
    """Results and bandwidth of collectives over all devices."""
    device, local = local_device(kind)
    device.choose_kernels(True)  # as training does by default, before NCCL chooses its algorithms
    device.start_process_group(local)
    mesh = Mesh(data=dist.get_world_size(), supports_reduction=device.supports_reduction)
    axis = mesh.world
    n, count = axis.size, _elements(kind, axis.size)
    x = torch.full((n * count,), axis.rank + 1.0, device=local)
    total = n * (n + 1) / 2
    calls: dict[str, tuple[Callable[[], Tensor], float]] = {
        "all-reduce": (lambda: collectives.all_reduce(x, axis), 2 * (n - 1) / n),
        "reduce-scatter": (lambda: collectives.reduce_scatter(x, axis), (n - 1) / n),
        "all-gather": (lambda: collectives.all_gather(x[:count], axis), (n - 1) / n),
    }
    measured, correct = [], True
    for name, (call, share) in calls.items():
        result = call()
        equal = (result == total).all() if name != "all-gather" else result.sum() == total * count
        correct &= bool(equal)
        rate = share * x.nbytes / fastest(device, call)
        measured.append(f"{name} {rate / 1e9:.3g} GB/s")
    mesh.close()
    return Result(", ".join(measured), correct)


def check_parallel_training(kind: str) -> Result:
    """Losses on all devices with each kind of parallelism, compared with one process on the CPU."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    expected = _losses(_profile("cpu", "float32", ranks))  # before a process group exists
    device, local = local_device(kind)
    device.start_process_group(local)
    losses = {way: _losses(_profile(kind, "float32", ranks, way)) for way in WAYS}
    return _within_tolerance({way: _error(actual, expected) for way, actual in losses.items()})


CHECKS = (
    Check("matrix products", "near the published peak", check_matrix_products),
    Check("memory", "near the published bandwidth", check_memory_bandwidth),
    Check("kernels", "within 1e-5, bf16 2e-2", check_kernels, takes_profile=True),
    Check("training, one device", "losses within 1e-5, bf16 2e-2", check_training),
    Check("compiled", "the same losses; again much faster", check_compilation),
    Check("collectives", "correct; near the link's bandwidth", check_collectives, True),
    Check("training, all devices", "losses within 1e-5 in each way", check_parallel_training, True),
)


def measure_links(kind: str) -> Result:
    """Bytes per second that a device sends in gradient exchanges, by level of the network, as JSON."""
    device, local = local_device(kind)
    device.choose_kernels(True)  # as training does by default, before NCCL chooses its algorithms
    device.start_process_group(local)
    world = dist.get_world_size()
    chip = device.chip if world % device.chip == 0 else 1
    mesh = Mesh(data=world // chip, tensor=chip, supports_reduction=device.supports_reduction)
    links = {}
    for level, axis in (("chip", mesh.tensor), ("node", mesh.dp_shard)):
        if axis.size > 1:
            x = torch.ones(axis.size * _elements(kind, axis.size), device=local)
            shard = x[: x.numel() // axis.size].clone()
            seconds = fastest(device, partial(collectives.reduce_scatter, x, axis))
            seconds += fastest(device, partial(collectives.all_gather, shard, axis))
            links[level] = 2 * x.nbytes * (axis.size - 1) / axis.size / seconds
    mesh.close()
    return Result(json.dumps(links))


LINKS = Check("links", "", measure_links, all_devices=True)


def _within_tolerance(errors: dict[str, float]) -> Result:
    """Whether relative errors are within the tolerance of the precision in their name, else float32's."""
    measured = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    limits = (TOLERANCES.get(name, TOLERANCES["float32"]) for name in errors)
    return Result(measured, all(error <= limit for error, limit in zip(errors.values(), limits, strict=True)))


def local_device(kind: str) -> tuple[devices.Device, torch.device]:
    """The type of device, and this process's device."""
    device = devices.resolve(kind)
    return device, device.set_current(int(os.environ.get("LOCAL_RANK", "0")))


def _elements(kind: str, ranks: int) -> int:
    """Number of float32 elements per rank in timed collectives; on an accelerator, 1 GiB over all ranks."""
    return (1 << 20) if kind == "cpu" else (1 << 28) // ranks


def _error(actual: list[float], expected: list[float]) -> float:
    """The largest relative difference between losses of the same step; NaN if a loss is NaN."""
    errors = [abs(a - b) / abs(b) for a, b in zip(actual, expected, strict=True)]
    return torch.tensor(errors, dtype=torch.float64).max().item()


def _profile(kind: str, precision: str, ranks: int, way: str | None = None) -> Profile:
    """A small Llama that `ranks` ranks train, split in a `way`; without one, it trains in one process."""
    # Each rank of a large machine computes the reference on one CPU thread.
    split = max(degree for degree in range(1, MAX_SPLIT + 1) if ranks % degree == 0)
    parallel: dict[str, Any] = {way: split} if way in ("tensor", "context", "pipeline") else {}
    if way == "fsdp":
        parallel = {"data_sharding": "fsdp"}
    heads, length = split * max(1, 8 // split), 16 * split * -(-4 // split)
    model = {
        "hidden_size": heads * 16,
        "intermediate_size": heads * 32,
        "num_hidden_layers": max(2, split),
        "num_attention_heads": heads,
        "num_key_value_heads": 1 if split % 2 else 2,
    }
    train = {"global_batch_size": 2 * ranks, "sequence_length": length, "precision": precision}
    cluster = {"device": kind, "devices_per_node": ranks if way else 1, "threads": 1}
    return llama_profile(model, {"steps": STEPS, **train}, parallel=parallel, cluster=cluster)


def _losses(profile: Profile, graphs: Path | None = None) -> list[float]:
    """Losses of a few steps on random tokens that depend only on the number of ranks."""
    trainer = Trainer(profile, graphs)
    optimizer = make_optimizer(trainer)
    settings, data = profile.train, trainer.mesh.data
    size = (settings.global_batch_size, settings.sequence_length + 1)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(STEPS):
        samples = torch.randint(profile.model.vocab_size, size, generator=generator)
        optimizer.begin_step(profile.accumulation_steps)
        local = Batch(samples.chunk(data.size)[data.rank]) if trainer.reads_samples else Batch()
        loss = trainer.forward_backward(local, 1 / (size[0] * settings.sequence_length))
        optimizer.step(settings.learning_rate)
        losses += trainer.sum(loss[None]).tolist()
    trainer.mesh.close()
    return losses
