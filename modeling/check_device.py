"""Check a machine's devices step by step: `python -m modeling.check_device [--device KIND] ...`

The checks range from a matrix product to training on all devices of the machine, compared with the CPU in float32 or with the
vendor's published figures. Each check runs in separate processes, so that a crash or a hang does not affect the others. Run it
first on new hardware; `docs/devices/trainium.md` continues with several nodes.

With `--calibrate` it measures speeds instead and writes the planner's table (planning/calibration.py).

It checks this machine's accelerator; only `--device cpu` checks the CPU.

Exit codes: 0 all checks passed, 1 at least one failed, 2 no such device.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from modeling import exit_codes, kernel_errors
from modeling.compilation import compilers
from modeling.data.prefetch import Batch
from modeling.kernel_check import TOLERANCES as KERNEL_TOLERANCES
from modeling.planning import calibration
from modeling.planning.measure import calibrate, fastest
from modeling.training.train import make_optimizer
from modeling.training.trainer import Trainer
from parallel import collectives
from parallel import device as devices
from parallel.mesh import Mesh
from profiles import resolve
from profiles.errors import ProfileError
from profiles.schema import Profile

TIMEOUT = 900  # seconds of a check; the first compilation on an accelerator takes minutes
GRACE = 10.0  # seconds that processes of a check that timed out have to end
TOLERANCES = {precision: KERNEL_TOLERANCES[precision] for precision in ("float32", "bf16")}
STEPS = 5
MAX_SPLIT = 8  # ranks over which training is split in a way; further ranks are data-parallel
WAYS = ("tensor", "context", "pipeline", "data", "fsdp")  # in which training is split over devices


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
    device, local = _device(kind)
    size = 1024 if kind == "cpu" else 8192
    measured = []
    for precision, dtype in (("float32", torch.float32), ("bf16", torch.bfloat16)):
        a, b = (torch.randn(size, size, device=local).to(dtype) for _ in range(2))
        rate = 2 * size**3 / fastest(device, lambda a=a, b=b: a @ b)
        peak = device.peak(precision)
        share = f" ({rate / peak:.0%} of peak)" if peak else ""
        measured.append(f"{precision} {rate / 1e12:.3g} TFLOP/s{share}")
    return Result(", ".join(measured))


def check_memory_bandwidth(kind: str) -> Result:
    """Bandwidth of copies in device memory, compared with the published bandwidth."""
    device, local = _device(kind)
    size = (1 << 28) if kind == "cpu" else (1 << 30)
    x = torch.zeros(size, dtype=torch.uint8, device=local)
    y = torch.empty_like(x)
    rate = 2 * size / fastest(device, lambda: y.copy_(x))
    share = f" ({rate / device.bandwidth:.0%} of the published)" if device.bandwidth else ""
    return Result(f"{rate / 1e9:.3g} GB/s read and written{share}")


def check_kernels(kind: str, profile: Profile | None = None) -> Result:
    """Compare the kernels that a profile trains with, on its shapes, with float32 on the CPU."""
    device, local = _device(kind)
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
        compilers.make_compiler(profile).use_cache(Path(folder))  # before anything runs on the device
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
    device, local = _device(kind)
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
    device, local = _device(kind)
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
    device, local = _device(kind)
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
            seconds = fastest(device, lambda x=x, axis=axis: collectives.reduce_scatter(x, axis))
            seconds += fastest(device, lambda shard=shard, axis=axis: collectives.all_gather(shard, axis))
            links[level] = 2 * x.nbytes * (axis.size - 1) / axis.size / seconds
    mesh.close()
    return Result(json.dumps(links))


LINKS = Check("links", "", measure_links, all_devices=True)


def write_calibration(kind: str, processes: int, deterministic: bool = True) -> Path:
    """Measure this machine's devices and write their table.

    Args:
        deterministic: which kernels to measure, as `train.deterministic` chooses them.
    """
    links = {}
    if processes > 1:  # before this process uses a device: Neuron's runtime would reserve all of them
        measured = _run_isolated(LINKS, kind, processes)
        if not measured.passed:
            raise RuntimeError(f"collectives over {processes} devices: {measured.measured}")
        links = json.loads(measured.measured)
    device, local = _device(kind)
    device.choose_kernels(deterministic)
    table = calibrate(device, local, devices.name_of(device), compiled=kind != "cpu")
    if links:
        table = replace(table, links=links)
    path = calibration.path_of(table.accelerator)
    table.save(path)
    return path


def _within_tolerance(errors: dict[str, float]) -> Result:
    """Whether relative errors are within the tolerance of the precision in their name, else float32's."""
    measured = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    limits = (TOLERANCES.get(name, TOLERANCES["float32"]) for name in errors)
    return Result(measured, all(error <= limit for error, limit in zip(errors.values(), limits, strict=True)))


def _device(kind: str) -> tuple[devices.Device, torch.device]:
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
    parallel = {way: split} if way in ("tensor", "context", "pipeline") else {}
    if way == "fsdp":
        parallel = {"data_sharding": "fsdp"}
    heads = split * max(1, 8 // split)
    return Profile.model_validate(
        {
            "name": "check",
            "model": {
                "hidden_size": heads * 16,
                "intermediate_size": heads * 32,
                "num_hidden_layers": max(2, split),
                "num_attention_heads": heads,
                "num_key_value_heads": 1 if split % 2 else 2,
                "vocab_size": 512,
                "max_position_embeddings": 16 * max(4, split),
            },
            "tokenizer": {"source": "train", "vocabulary_size": 512},
            "data": {"sources": [{"kind": "python-docs"}]},
            "parallel": parallel,
            "train": {
                "steps": STEPS,
                "global_batch_size": 2 * ranks,
                "sequence_length": 16 * max(4, split),
                "learning_rate": 1e-3,
                "precision": precision,
            },
            "cluster": {"device": kind, "devices_per_node": ranks if way else 1, "threads": 1},
        }
    )


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


def default_processes(kind: str) -> int:
    """Number of devices, 2 for a CPU. Raises RuntimeError if the device's software is missing."""
    return 2 if kind == "cpu" else devices.resolve(kind).available()


def environment(kind: str) -> dict[str, str]:
    """This process's environment with the variables that launchers set for a run on the device."""
    return {**os.environ, **dict(devices.KINDS[kind].environment)}


def missing(kind: str) -> str:
    """Why torch finds no device of this type on this machine."""
    try:
        if kind == "cuda":
            torch.cuda.init()
        else:
            devices.torch_neuronx_version()
    except (AssertionError, RuntimeError) as error:  # torch's, if it is built without CUDA
        return str(error).partition("\n")[0]
    return "no device is visible"


def run_checks(kind: str, processes: int, profiles: Sequence[str] = ()) -> list[tuple[Check, Result, float]]:
    """Run each check, once per profile if it accepts one; returns checks, results and seconds."""
    results = []
    for check in CHECKS:
        if check.all_devices and processes == 1:
            continue
        for profile in profiles if check.takes_profile and profiles else (None,):
            shown = check if profile is None else _on_profile(check, profile)
            if sys.stderr.isatty():
                print(f"\r\x1b[2K{shown.name} ...", end="\r", file=sys.stderr, flush=True)
            start = time.perf_counter()
            result = _run_isolated(check, kind, processes, profile)
            results.append((shown, result, time.perf_counter() - start))
    return results


def _on_profile(check: Check, profile: str) -> Check:
    """The check with the profile's name and, if the profile uses FP8, the tolerance of FP8."""
    eight = resolve.load(profile).train.precision == "fp8"
    expected = f"{check.expected}, FP8 {KERNEL_TOLERANCES['fp8']:.0e}" if eight else check.expected
    return replace(check, name=f"{check.name}, {Path(profile).stem}", expected=expected)


def _run_isolated(check: Check, kind: str, processes: int, profile: str | None = None) -> Result:
    """Run a check in new processes."""
    command = [sys.executable, "-m"]
    if check.all_devices:
        command += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"]
    command += ["modeling.check_device", "--device", kind, "--check", check.name]
    command += ["--profile", profile] if profile else []
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env=environment(kind), **pipes)
    try:
        output, errors = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its ranks
        try:
            process.communicate(timeout=GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        return Result(f"timed out after {TIMEOUT} s", passed=False)
    if process.returncode == 0:
        return Result(**json.loads(output.splitlines()[-1]))
    lines = errors.splitlines()
    reason = next((line for line in lines if "Error" in line), lines[-1] if lines else "")
    return Result(f"failed ({process.returncode}): {reason}", passed=False)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="modeling.check_device", description=__doc__.splitlines()[0])
    about = "default: this machine's accelerator"
    parser.add_argument("--device", choices=sorted(devices.KINDS), help=about)
    parser.add_argument("--processes", type=int, help="default: all devices of the machine; 2 on a CPU")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    about = "profiles, by name or file, on whose shapes the kernels are checked"
    parser.add_argument("--profile", nargs="+", default=[], metavar="NAME", help=about)
    about = "measure speeds and write the planner's table instead of checking"
    parser.add_argument("--calibrate", action="store_true", help=about)
    parser.add_argument("--check", choices=[check.name for check in (*CHECKS, LINKS)], help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    kind = options.device or devices.detect()
    if kind == "cpu" and not options.device:
        reasons = "; ".join(f"{kind}: {missing(kind)}" for kind in devices.KINDS if kind != "cpu")
        parser.error(f"this machine has no accelerator; {reasons}; to check the CPU: --device cpu")
    if options.check:
        check = next(check for check in (*CHECKS, LINKS) if check.name == options.check)
        result = check.run(kind, *(map(resolve.load, options.profile) if check.takes_profile else ()))
        if int(os.environ.get("RANK", "0")) == 0:
            print(json.dumps(asdict(result)), flush=True)
        exit_codes.leave(0)
    try:
        for profile in options.profile:
            resolve.load(profile)
    except ProfileError as error:
        parser.error(f"argument --profile: {error}")
    try:
        processes = options.processes or default_processes(kind)
    except RuntimeError as error:
        parser.error(str(error))
    if processes < 1:
        parser.error(
            f"argument --device: this machine has no {kind} device: {missing(kind)}; to check the CPU: --device cpu"
        )
    if options.calibrate:
        os.environ.update(environment(kind))  # before this process uses the device
        print(f"wrote {write_calibration(kind, processes)}; plans started in this folder use it")
        return 0
    results = run_checks(kind, processes, options.profile)
    if options.json:
        rows = [{"check": c.name, "expected": c.expected, **asdict(result)} for c, result, _ in results]
        document = {"device": kind, "processes": processes, "torch": torch.__version__, "checks": rows}
        print(json.dumps(document, indent=1))
    else:
        _print_table(kind, processes, results)
    return int(not all(result.passed for _, result, _ in results))


def _print_table(kind: str, processes: int, results: list[tuple[Check, Result, float]]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console.print(f"{kind}, {processes} processes, torch {torch.__version__}\n")
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("", "check", "result", "expected", "time"):
        table.add_column(column)
    for check, result, seconds in results:
        mark = "[green]✓[/]" if result.passed else "[red]✗[/]"
        table.add_row(mark, check.name, result.measured, check.expected, f"{seconds:.0f} s")
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
