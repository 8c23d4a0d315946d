"""Verify and measure training on this machine's GPUs, compared with the installed peers, in one table.

Rows:

    checks      check_device, also on the kernels of every profile measured here; the tests that need a GPU
    training    a 1B Llama and layers of an 8B one (bf16, compiled, sequence 8192), compared with plain torch, Hugging Face and
                torchtitan, and in FP8 with torchao; 1B also with deterministic kernels only
    kernels     attention, loss and AdamW, compared with the best libraries for each
    ring        the blocks of one rank of ring attention, without communication, compared with one device's attention
    two GPUs    FSDP compared with torch's FSDP2, TP with DTensor's, both sides compiled; TP with its matrix products in chunks,
                in bf16 and FP8, and fused with the collectives; experts compared with torch's grouped products, for which
                the host waits in each layer and nothing overlaps; ring attention

If a row's peer is not installed, ours is measured alone, unless another row does so; the row is incomplete. A row that needs more
GPUs is listed as not run. A second table compares figures with their
targets: MFU at 1B, the speed of 8B at full depth, and the planner's step time, after a calibration, with the measured one. MFU
counts 6 FLOPs per multiply-add of the forward pass, with causal attention as half of the full square, relative to the card's
dense bf16 peak. Neither side of the other rows is restricted to deterministic kernels.

With --minutes it runs other rows, one GPU's and without rounds, the most valuable first, except those that the file has for this
card (benchmarks/gpu_lease).

--rehearse runs every row on the CPU with tiny sizes, to test the command before you pay for a GPU; its figures say nothing about
GPUs. Its two "GPUs" are two processes, and tests that need a GPU are reported as skipped.

Exit codes: 0 all rows ran and agree, 1 one failed, 2 no CUDA device, or --out cannot be written, 3 a row is incomplete or was not
run (in a rehearsal: for lack of a package).
"""

import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_lease import lease
from benchmarks.gpu_lease import rows as lease_rows
from benchmarks.harness.results import Results
from benchmarks.harness.timing import make_parser, print_table
from benchmarks.harness.workload import full_depth_speed
from benchmarks.operators import kernels, ring_attention
from benchmarks.operators.ring_attention import LLAMA_8B_HEADS, RANKS, SMALL_HEADS
from benchmarks.rows.checks import DeviceChecks, MarkedTests
from benchmarks.rows.comparisons import (
    Comparison,
    KernelComparison,
    Result,
    RingComparison,
    Schedule,
    TrainingComparison,
)
from benchmarks.rows.report import STYLES, machine, run, show
from benchmarks.training_steps import ours
from modeling.check_device import isolation
from modeling.models.flops import flops_per_token
from modeling.planning.planner import plan
from parallel import device
from profiles.schema import Profile
from profiles.sections.base import required

Training, Kernel = TrainingComparison, KernelComparison  # of which the table has many
# What rows of training have in common.
ONE: dict[str, Any] = {
    "processes": 1,
    "precision": "bf16",
    "compiled": True,
    "workload": "1b",
    "device": "cuda",
}
TWO: dict[str, Any] = {**ONE, "processes": 2}
LAYERS, FEWER = ({**ONE, "workload": name} for name in ("8b-layers", "8b-2-layers"))
PLAIN, PLAIN_TORCH = ("plain",), "plain torch, compiled"
TITAN: dict[str, Any] = {"peer": ("torchtitan",), "requires": "torchtitan"}
FP8: dict[str, Any] = {"peer": ("plain", "--fp8"), "ours": ("--fp8",), "requires": "torchao"}
TENSOR = ("--tensor", "2", "--sequence-parallel")
CHUNK = ("ours", *TENSOR, "--overlap-chunks", "1")  # a peer
CHUNKS = "1B Llama, TP 2 with SP, in chunks"
DOCUMENTS = "attention within documents, fw+bw"
LOSS = "loss with projection, fw+bw"

COMPARISONS: tuple[Comparison, ...] = (
    Training("1b", "1B Llama, bf16, compiled", PLAIN_TORCH, 1.05, PLAIN, **ONE),
    Training(
        *("1b-deterministic", "1B Llama, deterministic kernels", "ours without", 0.90, ("ours",)),
        ours=("--deterministic",),
        **ONE,
    ),
    Training(
        *("1b-hf", "1B Llama, bf16, compiled", "Hugging Face, compiled", 1.05, ("hugging_face",)),
        requires="transformers",
        **ONE,
    ),
    Training("1b-titan", "1B Llama, bf16, compiled", "torchtitan", 0.95, **TITAN, **ONE),
    Training("1b-fp8", "1B Llama, FP8, compiled", "torchao", 1.05, **FP8, **ONE),
    Training("8b-layers", "4 layers of 8B, bf16, compiled", PLAIN_TORCH, 1.05, PLAIN, **LAYERS),
    Training("8b-2-layers", "2 layers of 8B, bf16, compiled", PLAIN_TORCH, 1.05, PLAIN, **FEWER),
    Training("8b-titan", "4 layers of 8B, bf16, compiled", "torchtitan", 0.95, **TITAN, **LAYERS),
    Training("8b-layers-fp8", "4 layers of 8B, FP8, compiled", "torchao", 1.05, **FP8, **LAYERS),
    Training("8b-2-layers-fp8", "2 layers of 8B, FP8, compiled", "torchao", 1.05, **FP8, **FEWER),
    Kernel("attention", "attention, fw+bw", "torch's", "attention", "torch", "8b"),
    Kernel(
        *("attention-fa", "attention, fw+bw", "flash-attn", "attention", "flash_attn", "8b"),
        requires="flash_attn",
    ),
    Kernel("attention-cudnn", "attention, fw+bw", "cuDNN", "attention", "cudnn", "8b"),
    Kernel(
        *("attention-fa3", "attention, fw+bw", "FlashAttention-3", "attention", "flash_attn_interface", "8b"),
        requires="flash_attn_interface",
    ),
    Kernel("documents", DOCUMENTS, "torch's, as a batch", "documents", "torch", "8b"),
    Kernel("documents-fa", DOCUMENTS, "flash-attn", "documents", "flash_attn", "8b", requires="flash_attn"),
    Kernel("loss", LOSS, "torch, compiled", "loss", "torch", "1b"),
    Kernel("loss-liger", LOSS, "Liger", "loss", "liger_kernel", "1b", requires="liger_kernel"),
    Kernel("adamw", "AdamW, 268M elements", "torch, fused", "adamw", "torch", "1b"),
    Training(
        *("fsdp", "1B Llama, FSDP over 2 GPUs, compiled", "FSDP2, compiled", 1.05, ("fsdp2",)),
        ours=("--data-sharding", "fsdp"),
        **TWO,
    ),
    Training(
        *("tensor", "1B Llama, TP 2 with SP, compiled", "DTensor with SP, compiled", 1.0),
        peer=("dtensor", "--sequence-parallel"),
        ours=TENSOR,
        **TWO,
    ),
    Training("tensor-chunks", CHUNKS, "ours without chunks", 1.0, CHUNK, TENSOR, **TWO),
    Training(
        *("tensor-chunks-fp8", "1B Llama, TP 2 with SP, FP8, in chunks", "ours without chunks", 1.0),
        peer=(*CHUNK, "--fp8"),
        ours=(*TENSOR, "--fp8"),
        **TWO,
    ),
    Training(
        *("tensor-async", "1B Llama, TP 2 with SP, async, compiled", "ours without", 1.0, CHUNK),
        ours=(*TENSOR, "--async-tensor"),
        **TWO,
    ),
    Training(
        *(
            "expert",
            "2 layers of Mixtral 8x7B, EP 2, compiled",
            "torch's grouped products and all-to-all",
            1.05,
        ),
        peer=("grouped_experts",),
        ours=("--expert", "2"),
        **{**TWO, "workload": "mixtral-layers"},
    ),
    *(
        RingComparison(
            f"{name}-{tokens // 1024}k",
            tokens,
            target=0.92,
            precision="bf16",
            heads=LLAMA_8B_HEADS,
            device="cuda",
            blocks=blocks,
        )
        for name, blocks in (("ring-blocks", RANKS), ("ring", None))
        for tokens in (32768, 131072)
    ),
)
OUT, LEASE = Path("build/benchmarks/gpu.jsonl"), Path("build/benchmarks/lease.jsonl")
CHECKS = ("check-device", "cuda-tests")
PACKAGE = "the package "
SUFFIXES = {"bf16": "", "FP8": "-fp8"}  # of the names of rows, by precision
# Profile whose kernels are also checked: a mixture of experts, which no row trains.
EXPERTS, SMALL_EXPERTS = "mixtral-8x7b-h100", "tiny-moe"
MFU_TARGET = 0.50  # at 1B
SPEED_TARGET = 6667  # tokens/s per GPU of 8B with all its layers
PLANNED = ("1b", "1b-fp8", "8b-layers", "8b-layers-fp8")  # rows whose step time is compared with the plan
PLAN_TOLERANCE = 0.10


@dataclass(frozen=True)
class Figure:
    """A measured figure and its target, or the reason why it was not measured."""

    row: str
    name: str
    measured: float | None
    target: str
    met: bool
    failure: str | None = None

    @property
    def status(self) -> str:
        return "failed" if self.failure else "met" if self.met else "missed"


def main() -> int:
    parser = make_parser(__doc__, rounds=3)
    names = [*CHECKS, *(comparison.name for comparison in COMPARISONS)]
    names += [row.name for row in lease_rows.ROWS if row.name not in names]
    help_text = "run the rows of a lease (benchmarks/gpu_lease/rows.py) within so many minutes, the most valuable first"
    parser.add("--minutes N", help_text, type=float)
    help_text = f"JSON Lines file to which each row is appended when it exists (default: {OUT}; with --minutes {LEASE}, whose "
    help_text += "rows of this card are skipped)"
    parser.add("--out FILE", help_text, type=Path)
    parser.add("--nccl FILE", "with --minutes: NCCL library that allows several ranks on one GPU", type=Path)
    parser.add("--only ROW", f"run only these, of {', '.join(names)}", nargs="+", choices=names)
    parser.add("--rehearse", "run the rows on the CPU with tiny sizes")
    options = parser.parse_args()
    if not options.rehearse and not torch.cuda.is_available():
        print(
            "benchmarks.gpu: torch finds no CUDA device; run it on a machine with a GPU, or with --rehearse",
            file=sys.stderr,
        )
        return 2
    if options.minutes:
        graphs = Path(tempfile.gettempdir()) / "trainshed-lease-graphs"
        deadline = time.monotonic() + 60 * options.minutes
        lent = lease.Machine(options.rehearse, deadline, graphs, options.nccl)
        leased = [row for row in lease_rows.ROWS if not options.only or row.name in options.only]
        return lease.run(leased, lent, options.out or LEASE)
    card = lease.REHEARSAL if options.rehearse else torch.cuda.get_device_name()
    ring_attention.preload()
    rows = checks_and_comparisons(options.rehearse)
    chosen = [item for item in rows if not options.only or item.name in options.only]
    gpus = 2 if options.rehearse else torch.cuda.device_count()
    runnable, lacking = divide(chosen, gpus)
    with tempfile.TemporaryDirectory(prefix="benchmarks-graphs-") as folder:
        warm_up, steps = (1, 2) if options.rehearse else (3, 10)
        schedule = Schedule(options.rounds, warm_up, steps, folder)
        results = run(runnable, schedule, options.out or OUT, card=card)
    trained = {
        item.name: (item, result)
        for item, result in zip(runnable, results, strict=True)
        if isinstance(item, TrainingComparison) and isinstance(result, Result) and not result.failure
    }
    speeds = [speed for pair in trained.values() for speed in training_speeds(*pair)]
    measured = {name: result for name, (_, result) in trained.items()}
    depths = {precision: full_depth(measured, suffix) for precision, suffix in SUFFIXES.items()}
    figures = [*speed_figures(speeds, depths), *plan_figures(trained)]
    derived = [*speeds, *({**asdict(figure), "status": figure.status} for figure in figures)]
    derived += [{"row": name, "not_run": needs} for name, needs in lacking.items()]
    kept = Results(options.out or OUT)
    for row in derived:
        kept.append({**row, "machine": machine(card)})
    show(results, schedule)
    _print_speeds(speeds, figures)
    for result in results:
        if isinstance(result, Result) and result.lacks:
            print(f"{result.name}: incomplete, {result.against} needs {result.lacks}")
    for name, needs in lacking.items():
        print(f"{name}: not run, needs {needs}")
    if options.rehearse:
        print("This was a rehearsal on the CPU with tiny sizes: its figures say nothing about GPUs.")
    if any(each.status == "failed" for each in (*results, *figures)):
        return 1
    unmet = [needs for needs in lacking.values() if not options.rehearse or needs.startswith(PACKAGE)]
    return 3 if unmet or any(result.status == "incomplete" for result in results) else 0


Row = Comparison | DeviceChecks | MarkedTests


def checks_and_comparisons(rehearse: bool) -> list[Row]:
    """All rows, the checks first; `rehearse` selects their small versions for the CPU."""
    comparisons = list(map(rehearsed, COMPARISONS)) if rehearse else list(COMPARISONS)
    made: dict[str, Profile] = {}
    for item in comparisons:
        if isinstance(item, TrainingComparison):
            profile = profile_of(item)
            if profile not in made.values():
                made[item.name] = profile
    profiles = tuple(profile.model_copy(update={"name": name}) for name, profile in made.items())
    device = "cpu" if rehearse else "cuda"
    experts = SMALL_EXPERTS if rehearse else EXPERTS
    checks: list[Row] = [DeviceChecks(profiles, (experts,), device), MarkedTests(device=device)]
    return [*checks, *comparisons]


def divide(rows: Sequence[Row], gpus: int) -> tuple[list[Row], dict[str, str]]:
    """The rows that run, without their peer if its package is missing, and what the others need, by name.

    Our side is not measured alone if another row measures it.
    """
    lacking = {item.name: needs for item in rows if (needs := missing(item, gpus))}
    runnable = [item for item in rows if item.name not in lacking]
    measured = {item.measured for item in runnable if isinstance(item, TrainingComparison | KernelComparison)}
    for item in rows:
        if not isinstance(item, TrainingComparison | KernelComparison) or item.measured in measured:
            continue
        if lacking.get(item.name, "").startswith(PACKAGE):
            measured.add(item.measured)
            runnable.append(replace(item, lacks=lacking.pop(item.name)))
    order = [item.name for item in rows]
    return sorted(runnable, key=lambda item: order.index(item.name)), lacking


def missing(comparison: Row, gpus: int) -> str | None:
    """What a row needs that this machine lacks; None if it can run."""
    if comparison.processes > gpus:
        return f"{comparison.processes} GPUs"
    if comparison.device == "cpu" and "--async-tensor" in getattr(comparison, "ours", ()):
        return "CUDA devices"
    if getattr(comparison, "peer", None) == "cudnn" and not kernels.has_cudnn(comparison.device):
        return "a GPU with cuDNN's attention"
    if comparison.requires and find_spec(comparison.requires) is None:
        return PACKAGE + comparison.requires
    return None


def rehearsed(comparison: Comparison) -> Comparison:
    """A small version of the row that runs on the CPU in seconds."""
    if isinstance(comparison, TrainingComparison):
        small = "mixtral" if comparison.workload == "mixtral-layers" else "small"
        return replace(comparison, device="cpu", workload=small)
    if isinstance(comparison, KernelComparison):
        return replace(comparison, device="cpu", sizes="small")
    return replace(comparison, device="cpu", tokens=comparison.tokens // 64, heads=SMALL_HEADS)


def profile_of(comparison: TrainingComparison) -> Profile:
    """The profile that our side of a row trains."""
    arguments = [*comparison.ours, "--workload", comparison.workload, "--device", comparison.device]
    arguments += ["--precision", comparison.precision]
    arguments += ["--graphs", "graphs"] if comparison.compiled else []
    return ours.make_profile(ours.parser().parse_args(arguments), comparison.processes)


def training_speeds(comparison: TrainingComparison, result: Result) -> Iterator[dict[str, Any]]:
    """Tokens/s per GPU and MFU of each side; MFU is None if the card's peak FLOP/s is unknown."""
    peak = device.resolve(comparison.device).peak("bf16")
    flops = flops_per_token(profile_of(comparison))
    for side, seconds in (("ours", result.ours), (comparison.against, result.peer)):
        if not seconds:
            continue
        speed = required(result.tokens) / statistics.median(seconds) / comparison.processes
        mfu = peak and speed * flops / peak
        yield {"row": comparison.name, "side": side, "tokens_per_second": speed, "mfu": mfu}


def full_depth(results: Mapping[str, Result], suffix: str) -> float | None:
    """`full_depth_speed` by the rows of 2 and 4 layers with this suffix; None without both."""
    names = [f"{name}{suffix}" for name in ("8b-2-layers", "8b-layers")]
    if not {*names} <= results.keys():
        return None
    two, four = (statistics.median(results[name].ours) for name in names)
    return full_depth_speed(required(results[names[1]].tokens), two, four)


def speed_figures(
    speeds: Sequence[Mapping[str, Any]], depths: Mapping[str, float | None]
) -> Iterator[Figure]:
    """MFU at 1B, if the card's peak is known, and tokens/s of 8B at full depth."""
    for speed in speeds:
        if (speed["row"], speed["side"]) == ("1b", "ours") and speed["mfu"]:
            yield Figure("1b", "MFU", speed["mfu"], f"at least {MFU_TARGET:.0%}", speed["mfu"] >= MFU_TARGET)
    for precision, depth in depths.items():
        if depth:
            name = f"tokens/s per GPU of 8B in {precision} at full depth, from its 2 and 4 layers"
            row, target = f"8b-layers{SUFFIXES[precision]}", f"above {SPEED_TARGET:,}"
            yield Figure(row, name, depth, target, depth > SPEED_TARGET)


def plan_figures(trained: Mapping[str, tuple[TrainingComparison, Result]]) -> Iterator[Figure]:
    """The planner's step time, after calibrating this device, relative to the measured one."""
    chosen = {name: trained[name] for name in PLANNED if name in trained}
    if not chosen:
        return
    name, target = "planned step time after calibration / measured", f"within {PLAN_TOLERANCE:.0%}"
    device, failure = next(iter(chosen.values()))[0].device, None
    with tempfile.TemporaryDirectory(prefix="benchmarks-calibration-") as folder, contextlib.chdir(folder):
        try:
            isolation.write_calibration(device, processes=1, settings=(False,))
        except (RuntimeError, ValueError) as error:
            failure = f"calibration: {error}"
        for row, (comparison, result) in chosen.items():
            planned = None if failure else plan(profile_of(comparison)).step_seconds
            if planned is None:
                reason = failure or "the calibration has no figures for its precision"
                yield Figure(row, name, None, target, False, reason)
                continue
            share = planned / statistics.median(result.ours)
            yield Figure(row, name, share, target, abs(share - 1) <= PLAN_TOLERANCE)


def _print_speeds(speeds: Sequence[Mapping[str, Any]], figures: Sequence[Figure]) -> None:
    if speeds:
        headings = ("row", "side", "tokens/s per GPU", "MFU")
        print_table("", headings, map(_speed_cells, speeds), "MFU: relative to the dense bf16 peak")
    if figures:
        print_table("", ("row", "figure", "measured", "target", "result"), map(_figure_cells, figures))
    for figure in figures:
        if figure.failure:
            print(f"{figure.row}: {figure.name}: {figure.failure}", file=sys.stderr)


def _figure_cells(figure: Figure) -> tuple[str, ...]:
    measured = ""
    if figure.measured is not None:
        measured = f"{figure.measured:,.0f}" if figure.measured > 100 else f"{figure.measured:.1%}"
    status = f"[{STYLES[figure.status]}]{figure.status}[/]"
    return figure.row, figure.name, measured, figure.target, status


def _speed_cells(speed: Mapping[str, Any]) -> tuple[str, ...]:
    mfu = f"{speed['mfu']:.1%}" if speed["mfu"] else "peak unknown"
    return speed["row"], speed["side"], f"{speed['tokens_per_second']:,.0f}", mfu


if __name__ == "__main__":
    sys.exit(main())
