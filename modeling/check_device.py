"""A ladder of checks for whatever device is here: `python -m modeling.check_device [--device KIND] [--processes N] [--json]`

From one product to training over all devices of the machine, each rung in processes of its own, so that one that dies or
hangs costs no other. What a rung finds is compared with the same on the CPU in float32, or with the vendor's figure. It is
what to run first on new hardware; `docs/trainium.md` says what comes after it, on several nodes.

Exit codes: 0 every rung held, 1 one did not.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from modeling import exit_codes
from modeling.training.train import make_optimizer
from modeling.training.trainer import Trainer
from parallel import collectives
from parallel import device as devices
from parallel.attention import kernels
from parallel.attention.attention import attention
from parallel.mesh import Axis, Mesh
from profiles.schema import Profile

LIMIT = 900  # seconds a rung may take; a first compilation on an accelerator is what takes long
TOLERANCES = {"float32": 1e-5, "bf16": 2e-2}
STEPS = 5


@dataclass(frozen=True)
class Found:
    """What a rung found: in words, and whether it is as it should be."""

    words: str
    holds: bool = True


@dataclass(frozen=True)
class Rung:
    """A check.

    Attributes:
        name: what is checked.
        expected: what should be found.
        call: run on each process, with the kind of device and the precision.
        everywhere: whether it runs on all devices of the machine, else on one.
    """

    name: str
    expected: str
    call: Callable[[str], Found]
    everywhere: bool = False


def products(kind: str) -> Found:
    """Rate of matrix products, in each precision."""
    device, place = _device(kind)
    size = 1024 if kind == "cpu" else 8192
    words = []
    for precision, dtype in (("float32", torch.float32), ("bf16", torch.bfloat16)):
        a, b = (torch.randn(size, size, device=place).to(dtype) for _ in range(2))
        rate = 2 * size**3 / _seconds(device, lambda a=a, b=b: a @ b)
        peak = device.peak(precision)
        share = f" ({rate / peak:.0%} of peak)" if peak else ""
        words.append(f"{precision} {rate / 1e12:.3g} TFLOP/s{share}")
    return Found(", ".join(words))


def memory(kind: str) -> Found:
    """Rate of copying in the device's memory."""
    device, place = _device(kind)
    size = (1 << 28) if kind == "cpu" else (1 << 32)
    x = torch.zeros(size, dtype=torch.uint8, device=place)
    y = torch.empty_like(x)
    rate = 2 * size / _seconds(device, lambda: y.copy_(x))
    share = f" ({rate / device.bandwidth:.0%} of the published)" if device.bandwidth else ""
    return Found(f"{rate / 1e9:.3g} GB/s read and written{share}")


def attends(kind: str) -> Found:
    """The device's attention kernel against plain formulas on the CPU, forward and backward."""
    _, place = _device(kind)
    draw = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(2, heads, 256, 64, generator=draw) for heads in (8, 2, 2, 8))
    expected = _attention(q, k, v, grad, "math")
    kernel = kernels.default_kernel(q.to(place))
    worst = {}
    for precision, dtype in (("float32", torch.float32), ("bf16", torch.bfloat16)):
        try:
            found = _attention(*(x.to(place, dtype) for x in (q, k, v, grad)), kernel)
        except (RuntimeError, ValueError) as error:
            return Found(f"{kernel} in {precision}: {error}", holds=precision == "float32")
        worst[precision] = max(_difference(x.cpu(), y) for x, y in zip(found, expected, strict=True))
    words = ", ".join(f"{precision} {value:.1e}" for precision, value in worst.items())
    return Found(f"{kernel}: {words}", all(value <= TOLERANCES[name] for name, value in worst.items()))


def trains(kind: str) -> Found:
    """Losses of a few steps of a small Llama, against the CPU's in float32."""
    worst = {}
    expected = _losses(_profile("cpu", "float32", 1))
    for precision in TOLERANCES:
        found = _losses(_profile(kind, precision, 1))
        worst[precision] = _worst(found, expected)
    words = ", ".join(f"{precision} {value:.1e}" for precision, value in worst.items())
    return Found(words, all(value <= TOLERANCES[precision] for precision, value in worst.items()))


def compiles(kind: str) -> Found:
    """Compiled against eager: the same losses; seconds to compile, and to start again from the cache."""
    expected = _losses(_profile(kind, "float32", 1))
    with tempfile.TemporaryDirectory(prefix="trainshed-check-") as folder:
        seconds = []
        for _ in range(2):
            torch.compiler.reset()
            begun = time.perf_counter()
            found = _losses(_profile(kind, "float32", 1), Path(folder))
            seconds.append(time.perf_counter() - begun)
    worst = _worst(found, expected)
    return Found(f"{worst:.1e}; {seconds[0]:.1f} s, again {seconds[1]:.1f} s", worst <= TOLERANCES["float32"])


def communicates(kind: str) -> Found:
    """Collectives over all devices: right, and how fast."""
    device, place = _device(kind)
    dist.init_process_group(device.backend)
    axis = Mesh(data=dist.get_world_size(), supports_reduction=device.supports_reduction).world
    n, count = axis.size, (1 << 20) if kind == "cpu" else (1 << 26)
    x = torch.full((n * count,), axis.rank + 1.0, device=place)
    total = n * (n + 1) / 2
    checks: dict[str, tuple[Callable[[], Tensor], float]] = {
        "all-reduce": (lambda: collectives.all_reduce(x, axis), 2 * (n - 1) / n),
        "reduce-scatter": (lambda: collectives.reduce_scatter(x, axis), (n - 1) / n),
        "all-gather": (lambda: collectives.all_gather(x[:count], axis), (n - 1) / n),
    }
    words, holds = [], True
    for name, (call, share) in checks.items():
        result = call()
        good = (result == total).all() if name != "all-gather" else result.sum() == total * count
        holds &= bool(good)
        rate = share * x.nbytes / _seconds(device, call)
        words.append(f"{name} {rate / 1e9:.3g} GB/s")
    return Found(", ".join(words), holds)


def spreads(kind: str) -> Found:
    """Losses at every way to spread the model over all devices, against one process on the CPU."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    expected = _losses(_profile("cpu", "float32", ranks))  # before there is a process group
    dist.init_process_group(devices.resolve(kind).backend)
    worst = {}
    for axis in ("tensor", "context", "pipeline", "data"):
        found = _losses(_profile(kind, "float32", ranks, axis))
        worst[axis] = _worst(found, expected)
    words = ", ".join(f"{axis} {value:.1e}" for axis, value in worst.items())
    return Found(words, all(value <= TOLERANCES["float32"] for value in worst.values()))


LADDER = (
    Rung("matrix products", "near the published peak", products),
    Rung("memory", "near the published bandwidth", memory),
    Rung("attention", "within 1e-5, bf16 2e-2", attends),
    Rung("training, one device", "losses within 1e-5, bf16 2e-2", trains),
    Rung("compiled", "the same losses; again much faster", compiles),
    Rung("collectives", "right; near the link's rate", communicates, everywhere=True),
    Rung("training, all devices", "losses within 1e-5 on each axis", spreads, everywhere=True),
)


def _device(kind: str) -> tuple[devices.Device, torch.device]:
    """The kind, and this process's own device."""
    device = devices.resolve(kind)
    return device, device.set_current(int(os.environ.get("LOCAL_RANK", "0")))


def _seconds(device: devices.Device, call: Callable[[], object]) -> float:
    """Of one call, the fastest of several."""
    times = []
    for _ in range(6):  # the first one warms up
        device.synchronize()
        begun = time.perf_counter()
        call()
        device.synchronize()
        times.append(time.perf_counter() - begun)
    return min(times[1:])


def _attention(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, kernel: str) -> tuple[Tensor, ...]:
    """out, dq, dk, dv in float32."""
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attention(*inputs, Axis("context"), kernel=kernel)
    return tuple(x.detach().float() for x in (out, *torch.autograd.grad(out, inputs, grad)))


def _difference(found: Tensor, expected: Tensor) -> float:
    """Relative norm."""
    return ((found - expected).norm() / expected.norm()).item()


def _worst(found: list[float], expected: list[float]) -> float:
    """The largest relative difference between losses of the same step."""
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def _profile(kind: str, precision: str, ranks: int, axis: str | None = None) -> Profile:
    """A small Llama that can be spread over so many ranks along any axis; without an axis, on one process."""
    heads = ranks * max(1, 8 // ranks)
    return Profile.model_validate(
        {
            "name": "check",
            "model": {
                "hidden_size": heads * 16,
                "intermediate_size": heads * 32,
                "num_hidden_layers": max(2, ranks),
                "num_attention_heads": heads,
                "num_key_value_heads": 1 if ranks % 2 else 2,
                "vocab_size": 512,
                "max_position_embeddings": 16 * max(4, ranks),
            },
            "tokenizer": {"source": "train", "vocabulary_size": 512},
            "data": {"sources": [{"kind": "python-docs"}]},
            "parallel": {axis: ranks} if axis in ("tensor", "context", "pipeline") else {},
            "train": {
                "steps": STEPS,
                "global_batch_size": 2 * ranks,
                "sequence_length": 16 * max(4, ranks),
                "learning_rate": 1e-3,
                "precision": precision,
            },
            "cluster": {"device": kind, "devices_per_node": ranks if axis else 1},
        }
    )


def _losses(profile: Profile, graphs: Path | None = None) -> list[float]:
    """Of a few steps on random tokens, which are the same for every profile of as many ranks."""
    trainer = Trainer(profile, graphs, start=False)
    optimizer = make_optimizer(trainer)
    settings, data = profile.train, trainer.mesh.data
    size = (settings.global_batch_size, settings.sequence_length + 1)
    draw = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(STEPS):
        samples = torch.randint(profile.model.vocab_size, size, generator=draw)
        optimizer.begin_step(profile.accumulation_steps)
        own = samples.chunk(data.size)[data.rank] if trainer.reads_samples else None
        loss = trainer.forward_backward(own, 1 / (size[0] * settings.sequence_length))
        optimizer.step(settings.learning_rate)
        losses += trainer.sum(loss[None].cpu())
    trainer.mesh.close()
    return losses


def climb(kind: str, processes: int) -> list[tuple[Rung, Found, float]]:
    """Run every rung; what it found, and its seconds."""
    results = []
    for rung in LADDER:
        if rung.everywhere and processes == 1:
            continue
        if sys.stderr.isatty():
            print(f"\r\x1b[2K{rung.name} ...", end="\r", file=sys.stderr, flush=True)
        begun = time.perf_counter()
        results.append((rung, _apart(rung, kind, processes), time.perf_counter() - begun))
    return results


def _apart(rung: Rung, kind: str, processes: int) -> Found:
    """A rung in processes of its own."""
    command = [sys.executable, "-m"]
    if rung.everywhere:
        command += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"]
    command += ["modeling.check_device", "--device", kind, "--rung", rung.name]
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=environment)
    except subprocess.TimeoutExpired:
        return Found(f"not done after {LIMIT} s", holds=False)
    if ran.returncode == 0:
        return Found(**json.loads(ran.stdout.splitlines()[-1]))
    words = [line for line in ran.stderr.splitlines() if "Error" in line] or ran.stderr.splitlines()[-1:]
    return Found(f"failed ({ran.returncode}): {' '.join(words[:1])}", holds=False)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="modeling.check_device", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--device", choices=sorted(devices.KINDS), help="default: the accelerator that is here, else cpu"
    )
    parser.add_argument("--processes", type=int, help="default: all devices of the machine; 2 on a CPU")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of the table")
    parser.add_argument("--rung", choices=[rung.name for rung in LADDER], help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    kind = options.device or devices.detect()
    if options.rung:
        rung = next(rung for rung in LADDER if rung.name == options.rung)
        found = rung.call(kind)
        if int(os.environ.get("RANK", "0")) == 0:
            print(json.dumps(asdict(found)), flush=True)
        exit_codes.leave(0)
    try:
        processes = options.processes or (2 if kind == "cpu" else devices.resolve(kind).available())
    except RuntimeError as error:
        parser.error(str(error))
    if processes < 1:
        parser.error(f"argument --device: this machine has no {kind} device")
    results = climb(kind, processes)
    if options.json:
        rows = [{"rung": rung.name, "expected": rung.expected, **asdict(found)} for rung, found, _ in results]
        print(
            json.dumps(
                {"device": kind, "processes": processes, "torch": torch.__version__, "rungs": rows}, indent=1
            )
        )
    else:
        _show(kind, processes, results)
    return int(not all(found.holds for _, found, _ in results))


def _show(kind: str, processes: int, results: list[tuple[Rung, Found, float]]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console.print(f"{kind}, {processes} processes, torch {torch.__version__}\n")
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("", "check", "found", "expected", "took"):
        table.add_column(column)
    for rung, found, seconds in results:
        mark = "[green]✓[/]" if found.holds else "[red]✗[/]"
        table.add_row(mark, rung.name, found.words, rung.expected, f"{seconds:.0f} s")
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
