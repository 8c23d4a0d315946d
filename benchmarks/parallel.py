"""Compare training speed with Hugging Face, DTensor and torch's own parallelism.

Each comparison runs ours and the peer alternately, in fresh processes, on the same weights and batches, with two threads per
side. Each row is printed, and appended to --out, when it exists. By default there is one round of 20 minutes: rows run in order,
and none but the first starts that would not end in time if it took as long as the longest before. On cores on which a step takes
4 s, these are the first eight, one for each kind of parallelism; where it takes 0.5 s, all of them, in ten minutes. The tables of
the documentation are of --rounds 3 --minutes 600.
With --only, all chosen rows run, unless --minutes is given.

A comparison whose losses differ fails, whatever its ratio. A ratio is the peer's median step time over ours in the same round;
the table shows the median over the rounds, and their minimum and maximum. "Of bound" is the time of the step's matrix products
and attention alone (benchmarks/training_steps/bound.py), over ours.

Exit codes: 0 all comparisons that ran agree, 1 one failed, 2 arguments rejected.
"""

import sys
import tempfile
from typing import Any

from benchmarks.harness.timing import make_parser
from benchmarks.rows.comparisons import Comparison, RingComparison, Schedule, TrainingComparison
from benchmarks.rows.report import run, show

MINUTES, STEPS = 20, 10
# With experts: rounding can send a token with two nearly equal router scores to the other expert.
EXPERT_TOLERANCE = 5e-4
# With linear attention: transformers rounds strong decays more; up to 5.3e-5 on the CPUs measured.
LINEAR_TOLERANCE = 1e-4
# With both, such tokens are more: rounding differs more, and the layers behind one token read it. The first two steps agree to
# 3e-7; after eleven, two orders of summation of our own rule differ by 1e-3.
LINEAR_EXPERT_TOLERANCE = 5e-3
# With Muon: rounding can change an element's bits in bf16, in which matrices are orthogonalized.
MUON_TOLERANCE = 1e-4
MUON, DDP_MUON = ("--optimizer", "muon"), ("ddp", "--muon")
REPLICATED = "torch.optim.Muon on each rank"
HUGGING_FACE, GROUPED = ("hugging_face",), ("hugging_face", "--experts", "grouped_mm")
GROUPED_MM = "Hugging Face, grouped_mm"
Row = TrainingComparison  # of which the table has many
# What rows have in common.
ONE: dict[str, Any] = {"processes": 1}
MIXTRAL: dict[str, Any] = {"workload": "mixtral", "tolerance": EXPERT_TOLERANCE}
QWEN3_5: dict[str, Any] = {**ONE, "workload": "qwen3-5", "tolerance": LINEAR_TOLERANCE}
QWEN3_NEXT: dict[str, Any] = {**ONE, "workload": "qwen3-next", "tolerance": LINEAR_EXPERT_TOLERANCE}

# The most valuable first. The first eight are 17 runs of a side: 18 minutes, if a run takes 63 s (13 steps of 4 s, and a start).
COMPARISONS: tuple[Comparison, ...] = (
    Row("float32", "one process, float32", "Hugging Face", 1.10, HUGGING_FACE, bound_target=0.88, **ONE),
    Row("tensor", "TP 2", "DTensor", 1.25, ("dtensor",), ("--tensor", "2")),
    Row("data", "DP 2 with ZeRO-1", "ZeroRedundancyOptimizer", 1.10, ("ddp",)),
    Row("fsdp", "FSDP 2", "FSDP2", 1.10, ("fsdp2",), ("--data-sharding", "fsdp")),
    Row("context", "CP 2", "torch's balanced ring", 1.10, ("torch_ring",), ("--context", "2")),
    Row("pipeline", "PP 2, 1F1B", "torch's pipelining", 1.10, ("torch_pipeline",), ("--pipeline", "2")),
    Row("experts", "Mixtral, one process", GROUPED_MM, 1.25, GROUPED, **ONE, **MIXTRAL),
    Row(
        *("expert", "Mixtral, EP 2", "torch's grouped products and all-to-all", 1.25, ("grouped_experts",)),
        ours=("--expert", "2"),
        **MIXTRAL,
    ),
    Row(
        *("compiled", "one process, float32, compiled", "Hugging Face, compiled", 1.15, HUGGING_FACE),
        compiled=True,
        bound_target=0.92,
        **ONE,
    ),
    Row(
        *("bf16", "one process, bf16", "Hugging Face", 1.25, HUGGING_FACE),
        precision="bf16",
        bound_target=0.80,
        **ONE,
    ),
    Row(
        *("sequence", "TP 2 with SP", "DTensor with SP", 1.35, ("dtensor", "--sequence-parallel")),
        ours=("--tensor", "2", "--sequence-parallel"),
    ),
    Row("qwen3-5", "Qwen3.5, one process", "Hugging Face", 1.25, HUGGING_FACE, **QWEN3_5),
    Row("qwen3-next", "Qwen3-Next, one process", GROUPED_MM, 1.25, GROUPED, **QWEN3_NEXT),
    RingComparison("ring-8k", 8192),
    RingComparison("ring-32k", 32768),
    Row("muon", "DP 2, Muon", REPLICATED, 1.0, DDP_MUON, MUON, tolerance=MUON_TOLERANCE),
    Row(
        *("muon-update", "its update alone", REPLICATED, 1.40, DDP_MUON, (*MUON, "--wait-for-weights")),
        tolerance=MUON_TOLERANCE,
        update=True,
    ),
    # A figure without a target: the losses are others. In float32, whose products are as fast as those of the model.
    Row(
        *("muon-adamw", "DP 2, Muon in float32", "Trainshed's AdamW", 0.0, ("ours",)),
        ours=(*MUON, "--muon-dtype", "float32"),
        tolerance=1.0,
    ),
)


def main() -> int:
    names = [comparison.name for comparison in COMPARISONS]
    parser = make_parser(__doc__, rounds=1, out="parallel")
    parser.add("--quick", "one round of few steps: a check, not a measurement")
    parser.add(
        "--cpu-time",
        "compare whole training steps by CPU time of one thread per process, which other load affects less",
    )
    parser.add("--only ROW", f"of {', '.join(names)}", nargs="+", choices=names)
    help_text = "start no row but the first that would end after so many minutes, if it took as long as the longest before "
    help_text += f"(default: {MINUTES}; with --only, no limit)"
    parser.add("--minutes N", help_text, type=float)
    options = parser.parse_args()
    minutes = MINUTES if options.minutes is None and not options.only else options.minutes
    comparisons = [item for item in COMPARISONS if not options.only or item.name in options.only]
    elapsed = [item.name for item in comparisons if not isinstance(item, TrainingComparison) or item.update]
    if options.cpu_time and options.only and elapsed:
        parser.error(f"--cpu-time: measures whole training steps only, not {', '.join(elapsed)}")
    comparisons = [item for item in comparisons if not options.cpu_time or item.name not in elapsed]
    with tempfile.TemporaryDirectory(prefix="benchmarks-graphs-") as graphs:
        schedule = Schedule(options.rounds, 3, STEPS, graphs, options.cpu_time)
        if options.quick:
            schedule = Schedule(1, 1, 1, graphs, options.cpu_time)
        results = run(comparisons, schedule, options.out, minutes)
    for left in comparisons[len(results) :]:
        print(f"{left.name}: not run within {minutes:g} minutes", file=sys.stderr)
    show(results, schedule)
    return int(any(result.status == "failed" for result in results))


if __name__ == "__main__":
    sys.exit(main())
