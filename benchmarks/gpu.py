"""Compare training on this machine's GPUs with the peers that are installed: speed and MFU of each side, in one table.

Rows: a 1B Llama and layers of an 8B one (bf16, compiled, sequence 8192) beside plain torch, Hugging Face and torchtitan, in FP8
beside torchao; attention, loss and AdamW beside their best libraries; and on two GPUs FSDP beside torch's FSDP2, TP with its
products in chunks and merged with the collectives, and ring attention. A row whose peer is not installed, or that needs more
GPUs, is listed as not run. MFU counts 6 FLOPs per multiply-add of the forward pass, causal attention as half of the full square,
against the card's dense bf16 peak. With the row "1b" the planner's step time is compared too, after a calibration.

--rehearse runs every row on the CPU with tiny sizes, to see that the command works before a GPU is paid for; its figures say
nothing about GPUs. Its two "GPUs" are two processes.

Exit codes: 0 all rows that ran agree, 1 one failed, 2 no CUDA device.
"""

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.harness import ours
from benchmarks.harness.comparisons import (
    Comparison,
    KernelComparison,
    Result,
    RingComparison,
    Schedule,
    TrainingComparison,
)
from benchmarks.harness.report import machine, run, show
from benchmarks.harness.timing import make_parser, print_table
from benchmarks.operators.ring_attention import LLAMA_8B_HEADS, SMALL_HEADS
from modeling.models.flops import flops_per_token
from modeling.planning.planner import plan
from parallel import device
from profiles.schema import Profile

ONE = TrainingComparison(
    *("1b", "1B Llama, bf16, compiled", "plain torch, compiled", 1.05, ("peers.plain",)),
    processes=1,
    precision="bf16",
    compiled=True,
    workload="1b",
    device="cuda",
)
HUGGING_FACE = {
    "against": "Hugging Face, compiled",
    "peer": ("peers.hugging_face",),
    "requires": "transformers",
}
TITAN = {"against": "torchtitan", "peer": ("peers.torchtitan",), "requires": "torchtitan", "target": 0.95}
FP8 = {
    "against": "torchao",
    "peer": ("peers.plain", "--fp8"),
    "ours": ("--fp8",),
    "requires": "torchao",
    "title": "1B Llama, FP8, compiled",
}
LAYERS = replace(ONE, name="8b-layers", title="4 layers of 8B, bf16, compiled", workload="8b-layers")
FSDP = {"against": "FSDP2", "peer": ("peers.fsdp2",), "ours": ("--data-sharding", "fsdp"), "compiled": False}
TENSOR = ("--tensor", "2", "--sequence-parallel")
TENSOR_ONE_CHUNK = (*TENSOR, "--overlap-chunks", "1")
TENSOR_PARALLEL = replace(
    ONE,
    name="tensor",
    title="1B Llama, TP 2 with SP, compiled",
    against="DTensor with SP, eager",
    ours=TENSOR,
    peer=("peers.dtensor", "--sequence-parallel"),
    target=1.35,
    processes=2,
)
OURS_PLAIN = {"peer": ("harness.ours", *TENSOR_ONE_CHUNK), "target": 1.0}
DOCUMENTS = "attention within documents, fw+bw"

COMPARISONS: tuple[Comparison, ...] = (
    ONE,
    replace(ONE, name="1b-hf", **HUGGING_FACE),
    replace(ONE, name="1b-titan", **TITAN),
    replace(ONE, name="1b-fp8", **FP8),
    LAYERS,
    replace(LAYERS, name="8b-2-layers", title="2 layers of 8B, bf16, compiled", workload="8b-2-layers"),
    replace(LAYERS, name="8b-titan", **TITAN),
    replace(LAYERS, name="8b-layers-fp8", **{**FP8, "title": "4 layers of 8B, FP8, compiled"}),
    KernelComparison("attention", "attention, fw+bw", "torch's", "attention", "torch", "8b"),
    KernelComparison(
        *("attention-fa", "attention, fw+bw", "flash-attn", "attention", "flash_attn", "8b"),
        requires="flash_attn",
    ),
    KernelComparison("documents", DOCUMENTS, "torch's, as a batch", "documents", "torch", "8b"),
    KernelComparison(
        "documents-fa", DOCUMENTS, "flash-attn", "documents", "flash_attn", "8b", requires="flash_attn"
    ),
    KernelComparison("loss", "loss with projection, fw+bw", "torch, compiled", "loss", "torch", "1b"),
    KernelComparison(
        *("loss-liger", "loss with projection, fw+bw", "Liger", "loss", "liger_kernel", "1b"),
        requires="liger_kernel",
    ),
    KernelComparison("adamw", "AdamW, 268M elements", "torch, fused", "adamw", "torch", "1b"),
    replace(ONE, name="fsdp", title="1B Llama, FSDP over 2 GPUs, bf16", processes=2, **FSDP),
    TENSOR_PARALLEL,
    replace(TENSOR_PARALLEL, name="tensor-chunks", against="ours without chunks", **OURS_PLAIN),
    replace(
        TENSOR_PARALLEL,
        name="tensor-async",
        title="1B Llama, TP 2 with SP, async",
        against="ours without",
        **{**OURS_PLAIN, "ours": (*TENSOR, "--async-tensor")},
    ),
    *(
        RingComparison(
            f"ring-{tokens // 1024}k",
            tokens,
            target=0.92,
            precision="bf16",
            heads=LLAMA_8B_HEADS,
            device="cuda",
        )
        for tokens in (32768, 131072)
    ),
)
MFU_DUE = 0.50  # at 1B
DEPTH, DEPTH_DUE = 32, 6667  # layers of Llama 3 8B, and the tokens/s a GPU that are due
PLAN_TOLERANCE = 0.10


def main() -> int:
    parser = make_parser(__doc__, rounds=3)
    names = [comparison.name for comparison in COMPARISONS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="ROW", help=f"of {', '.join(names)}")
    parser.add_argument("--rehearse", action="store_true", help="run the rows on the CPU with tiny sizes")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the tables")
    options = parser.parse_args()
    if not options.rehearse and not torch.cuda.is_available():
        print(
            "benchmarks.gpu: torch finds no CUDA device; run it on a machine with a GPU, or with --rehearse",
            file=sys.stderr,
        )
        return 2
    chosen = [item for item in COMPARISONS if not options.only or item.name in options.only]
    if options.rehearse:
        chosen = list(map(rehearsed, chosen))
    gpus = 2 if options.rehearse else torch.cuda.device_count()
    lacking = {item.name: needs for item in chosen if (needs := missing(item, gpus))}
    runnable = [item for item in chosen if item.name not in lacking]
    with tempfile.TemporaryDirectory(prefix="benchmarks-graphs-") as graphs:
        warm_up, steps = (1, 2) if options.rehearse else (3, 10)
        schedule = Schedule(options.rounds, warm_up, steps, graphs)
        results = run(runnable, schedule)
    rows = list(zip(runnable, results, strict=True))
    speeds = [
        speed
        for item, result in rows
        if isinstance(item, TrainingComparison) and not result.failure
        for speed in training_speeds(item, result)
    ]
    depth = full_depth_speed({result.name: result for result in results if not result.failure})
    planned = None
    for item, result in rows:
        if item.name == "1b" and not result.failure:
            planned = planned_beside_measured(item, result)
    if options.json:
        card = "a rehearsal on the CPU" if options.rehearse else torch.cuda.get_device_name()
        document = {"machine": {**machine(), "card": card}, "rows": [result.to_json() for result in results]}
        document |= {"speeds": speeds, "8b_at_full_depth": depth, "plan": planned, "not_run": lacking}
        print(json.dumps(document))
    else:
        show(results, schedule)
        _print_speeds(speeds, depth, planned)
        for name, needs in lacking.items():
            print(f"{name}: not run, needs {needs}")
        if options.rehearse:
            print("A rehearsal on the CPU with tiny sizes: its figures say nothing about GPUs.")
    return int(any(result.status == "failed" for result in results))


def missing(comparison: Comparison, gpus: int) -> str | None:
    """What a row needs that this machine lacks; None if it can run."""
    if comparison.processes > gpus:
        return f"{comparison.processes} GPUs"
    if comparison.device == "cpu" and "--async-tensor" in getattr(comparison, "ours", ()):
        return "CUDA devices"
    if comparison.requires and find_spec(comparison.requires) is None:
        return f"the package {comparison.requires}"
    return None


def rehearsed(comparison: Comparison) -> Comparison:
    """The row on the CPU, so small that it runs in seconds."""
    if isinstance(comparison, TrainingComparison):
        return replace(comparison, device="cpu", workload="small")
    if isinstance(comparison, KernelComparison):
        return replace(comparison, device="cpu", sizes="small")
    return replace(comparison, device="cpu", tokens=comparison.tokens // 64, heads=SMALL_HEADS)


def profile_of(comparison: TrainingComparison) -> Profile:
    """The profile that our side of a row trains."""
    arguments = [*comparison.ours, "--workload", comparison.workload, "--device", comparison.device]
    arguments += [
        "--precision",
        comparison.precision,
        *(["--graphs", "graphs"] if comparison.compiled else []),
    ]
    return ours.make_profile(ours.parser().parse_args(arguments), comparison.processes)


def training_speeds(comparison: TrainingComparison, result: Result) -> Iterator[dict[str, Any]]:
    """Tokens/s a GPU and model FLOPs utilization of each side; its MFU is None for a card of unknown peak FLOP/s."""
    peak = device.resolve(comparison.device).peak("bf16")
    flops = flops_per_token(profile_of(comparison))
    for side, seconds in (("ours", result.ours), (comparison.against, result.peer)):
        speed = result.tokens / statistics.median(seconds) / comparison.processes
        mfu = peak and speed * flops / peak
        yield {"row": comparison.name, "side": side, "tokens_per_second": speed, "mfu": mfu}


def full_depth_speed(results: Mapping[str, Result]) -> float | None:
    """Tokens/s a GPU of all layers of the 8B model: a step's seconds grow with the layers by as much as from 2 to 4 of them.

    Returns:
        None without both rows, or where 4 layers were not slower than 2.
    """
    if not {"8b-2-layers", "8b-layers"} <= results.keys():
        return None
    two, four = (statistics.median(results[name].ours) for name in ("8b-2-layers", "8b-layers"))
    if four <= two:
        return None
    return results["8b-layers"].tokens / (four + (DEPTH - 4) * (four - two) / 2)


def planned_beside_measured(comparison: TrainingComparison, result: Result) -> dict[str, float] | None:
    """The planner's seconds of a row's step after a calibration of this device, and the measured ones."""
    command = [sys.executable, "-m", "modeling.check_device", "--calibrate", "--processes", "1"]
    with tempfile.TemporaryDirectory(prefix="benchmarks-calibration-") as folder, contextlib.chdir(folder):
        subprocess.run([*command, "--device", comparison.device], check=True, stdout=subprocess.DEVNULL)
        planned = plan(profile_of(comparison)).step_seconds
    return planned and {"planned_seconds": planned, "measured_seconds": statistics.median(result.ours)}


def _print_speeds(
    speeds: Sequence[Mapping[str, Any]], depth: float | None, planned: Mapping[str, float] | None
) -> None:
    if speeds:
        headings = ("row", "side", "tokens/s a GPU", "MFU", "due")
        print_table("", headings, map(_speed_cells, speeds), "MFU: against the dense bf16 peak")
    if depth:
        print(f"8B at full depth, from its 2 and 4 layers: {depth:,.0f} tokens/s a GPU (due: {DEPTH_DUE:,})")
    if planned:
        ours, theirs = planned["measured_seconds"], planned["planned_seconds"]
        print(
            f"1b: {1e3 * ours:,.0f} ms per step, planned after calibration {1e3 * theirs:,.0f} ms, "
            f"{theirs / ours:.2f} of it (due: within {PLAN_TOLERANCE:.0%})"
        )


def _speed_cells(speed: Mapping[str, Any]) -> tuple[str, ...]:
    mfu = f"{speed['mfu']:.1%}" if speed["mfu"] else "no peak on record"
    due = f"{MFU_DUE:.0%}" if (speed["row"], speed["side"]) == ("1b", "ours") else ""
    return speed["row"], speed["side"], f"{speed['tokens_per_second']:,.0f}", mfu, due


if __name__ == "__main__":
    sys.exit(main())
