"""The rows of a lease, most valuable first, each with its figures.

1b, deterministic and not     what the default costs; MFU
ranks                         every kind of parallelism over NCCL, several ranks on one GPU, and their recovery:
                              correctness, not speed
8b layers, FP8                8B at full depth, from 2 and 4 layers
cuda-tests                    the tests that need a GPU
mixtral                       compiled experts against eager ones
kernels                       attention, loss, AdamW
lora-8b, long context         8B with LoRA on one card; 2 layers of 8B at 128k to 1M tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks.gpu_lease.lease import Machine, Row
from benchmarks.gpu_lease.recovery import recovery
from benchmarks.harness.processes import GRACE, Measurement, largest_difference
from benchmarks.rows.checks import MarkedTests
from benchmarks.training_steps import ours
from modeling.models.flops import flops_per_token
from parallel import device as devices

COMPILES = 200  # seconds of a training row, most of which compile
RANKS_TOLERANCE = 1e-5  # relative, of each step's loss, in float32
OURS = "benchmarks.training_steps.ours"
COMPILED = "--compiled"
RANKS = {
    "fsdp": (2, ("--data-sharding", "fsdp")),
    "zero1": (2, ("--data-sharding", "zero1")),
    "tensor with sp": (2, ("--tensor", "2", "--sequence-parallel")),
    "tensor in chunks": (2, ("--tensor", "2", "--sequence-parallel", "--overlap-chunks", "2")),
    "context": (2, ("--context", "2")),
    "pipeline": (2, ("--pipeline", "2")),
    "expert": (2, ("--expert", "2")),
    "expert-compiled": (2, ("--expert", "2", "--recompute", "full", COMPILED)),
    "hsdp": (4, ("--data-sharding", "fsdp", "--shard-degree", "2")),
}
KERNELS = (
    *(("attention", peer, "8b") for peer in ("ours", "torch", "cudnn")),
    *(("documents", peer, "8b") for peer in ("ours", "torch")),
    *((kernel, peer, "1b") for kernel in ("loss", "adamw") for peer in ("ours", "torch")),
)
Figures = dict[str, Any]


def arguments(machine: Machine, workload: str, *more: str, steps: int = 10, warm_up: int = 3) -> list[str]:
    """Options of our training step; small, and in float32 instead of bf16, in a rehearsal."""
    if machine.rehearse:
        workload, steps, warm_up = "tiny-mixtral" if workload == "mixtral" else "tiny", 2, 1
    precision = "float32" if machine.rehearse else "bf16"
    given = ["--workload", workload, "--precision", precision, "--device", machine.device, "--threads", "1"]
    given += [*more, "--steps", str(steps), "--warm-up", str(warm_up)]
    return given


def training(machine: Machine, workload: str, *more: str, compiled: bool = True, **steps: int) -> Figures:
    """Time of a step, tokens/s, MFU relative to the bf16 peak, and losses."""
    given = arguments(machine, workload, *more, **steps)
    if compiled and not machine.rehearse:
        given += ["--graphs", str(machine.graphs)]
    result = machine.run(OURS, *given, limit=COMPILES)
    seconds = result.median_seconds()
    profile = ours.make_profile(ours.parser().parse_args(given), 1)
    speed = profile.step_tokens / seconds
    figures = {"ms": round(1e3 * seconds, 2), "tokens_per_second": round(speed)}
    if peak := devices.resolve(machine.device).peak("bf16"):
        figures["mfu"] = round(speed * flops_per_token(profile) / peak, 4)
    return {**figures, "losses": result.losses, "peak_gib": round(result.peak_bytes / 2**30, 2)}


def ranks(machine: Machine, count: int, options: Sequence[str]) -> Figures:
    """Losses of several ranks on the one device, with the product's process groups, against one rank's."""
    workload = "mixtral" if "--expert" in options else "small"
    workload = f"tiny-{workload}".removesuffix("-small") if machine.rehearse else workload
    given = ["--workload", workload, "--device", machine.device, "--steps", "2", "--warm-up", "1"]
    expected = machine.run(OURS, *given, limit=60)
    if COMPILED in options:
        options = [each for each in options if each != COMPILED]
        given += [] if machine.rehearse else ["--graphs", str(machine.graphs)]
    found = machine.run(OURS, *given, *options, limit=90, ranks=count)
    difference = largest_difference([found, expected])
    if not difference <= RANKS_TOLERANCE:
        message = f"losses of {count} ranks differ by {difference:.1e} from one rank's: "
        raise ValueError(f"{message}{found.losses}, {expected.losses}")
    return {"ranks": count, "largest_difference": difference}


def experts(machine: Machine) -> Figures:
    """Losses of compiled experts against eager ones, and both times."""
    eager = training(machine, "mixtral", compiled=False, steps=3, warm_up=1)
    compiled = training(machine, "mixtral", steps=3, warm_up=1)
    difference = largest_difference([Measurement([], each["losses"]) for each in (eager, compiled)])
    return {"eager_ms": eager["ms"], "compiled_ms": compiled["ms"], "largest_difference": difference}


def kernel(machine: Machine, name: str, peer: str, sizes: str) -> Figures:
    given = [name, peer, "--sizes", "small" if machine.rehearse else sizes, "--device", machine.device]
    result = machine.run("benchmarks.operators.kernels", *given, "--warm-up", "3", "--steps", "10", limit=40)
    return {"ms": round(1e3 * result.median_seconds(), 3)}


def device_tests(machine: Machine) -> Figures:
    """The tests that need a GPU; a rehearsal runs one file of them, whose tests are skipped."""
    few = ("tests/parallel/attention/test_attention.py",)
    paths = few if machine.rehearse else ("tests/parallel", "tests/modeling")
    proof = MarkedTests(paths, machine.device, timeout=machine.left).run(None, lambda _: None)
    if proof.failure:
        raise RuntimeError(f"{proof.counted}: {proof.failure}")
    return {"counted": proof.counted}


def train(name: str, workload: str, *more: str, needs: float = 60, **options: Any) -> Row:
    return Row(name, needs, lambda machine: training(machine, workload, *more, **options))


LONG = {"8b-2-layers-128k": 120, "8b-2-layers-512k": 150, "8b-2-layers-1m": 200}  # seconds
ROWS: tuple[Row, ...] = (
    train("1b-deterministic", "1b", "--deterministic"),
    train("1b", "1b"),
    *(
        Row(f"ranks-{name}", 40 + GRACE, partial(ranks, count=count, options=options))
        for name, (count, options) in RANKS.items()
    ),
    Row("ranks-recovery", 70 + GRACE, recovery),
    train("8b-layers-deterministic", "8b-layers", "--deterministic"),
    train("8b-2-layers-deterministic", "8b-2-layers", "--deterministic"),
    train("1b-fp8", "1b", "--fp8", "--deterministic"),
    train("8b-layers", "8b-layers"),
    train("8b-2-layers", "8b-2-layers"),
    Row("cuda-tests", 60, device_tests),
    Row("mixtral", 50, experts),
    *(
        Row(f"kernel-{name}-{peer}", 15, partial(kernel, name=name, peer=peer, sizes=sizes), peer == "cudnn")
        for name, peer, sizes in KERNELS
    ),
    train("lora-8b", "8b-4k", "--lora-rank", "16", needs=90, steps=5),
    *(
        train(name, name, "--deterministic", "--recompute", "full", needs=needs, steps=2, warm_up=1)
        for name, needs in LONG.items()
    ),
)
