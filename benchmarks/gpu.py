"""Compare training on this machine's GPUs with the peers that are installed: tokens/s and MFU of each side.

Rows: a 1B Llama and four layers of an 8B one (bf16, compiled, sequence 8192) beside plain torch and Hugging Face, in FP8 beside
torchao, and FSDP over two GPUs beside torch's FSDP2. A row whose peer is not installed, or that needs more GPUs, is listed as not
run. MFU counts 6 FLOPs per multiply-add of the forward pass, causal attention as half of the full square, against the card's
dense bf16 peak.

Exit codes: 0 all rows that ran agree, 1 one failed, 2 no CUDA device.
"""

import json
import statistics
import sys
import tempfile
from dataclasses import replace
from importlib.util import find_spec

import torch

from benchmarks.harness import ours
from benchmarks.harness.comparisons import Result, Schedule, TrainingComparison
from benchmarks.harness.report import machine, run, show
from benchmarks.harness.timing import make_parser
from modeling.models.flops import flops_per_token
from parallel import device

ONE = TrainingComparison(
    *("1b", "1B Llama, bf16, compiled", "plain torch, compiled", 1.05, ("plain",)),
    processes=1,
    precision="bf16",
    compiled=True,
    workload="1b",
    device="cuda",
)
HUGGING_FACE = {"against": "Hugging Face, compiled", "peer": ("hugging_face",), "requires": "transformers"}
FP8 = {"against": "torchao", "peer": ("plain", "--fp8"), "ours": ("--fp8",), "requires": "torchao"}
LAYERS = replace(ONE, name="8b-layers", title="4 layers of 8B, bf16, compiled", workload="8b-layers")
FSDP = {"against": "FSDP2", "peer": ("fsdp2",), "ours": ("--data-sharding", "fsdp"), "compiled": False}
COMPARISONS = (
    ONE,
    replace(ONE, name="1b-hf", **HUGGING_FACE),
    LAYERS,
    replace(LAYERS, name="8b-layers-fp8", title="4 layers of 8B, FP8, compiled", **FP8),
    replace(ONE, name="fsdp", title="1B Llama, FSDP over 2 GPUs, bf16", processes=2, **FSDP),
)


def missing(comparison: TrainingComparison, gpus: int) -> str | None:
    """What a row needs that this machine lacks; None if it can run."""
    if comparison.processes > gpus:
        return f"{comparison.processes} GPUs"
    if comparison.requires and find_spec(comparison.requires) is None:
        return f"the package {comparison.requires}"
    return None


def main() -> int:
    parser = make_parser(__doc__, rounds=3)
    names = [comparison.name for comparison in COMPARISONS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="ROW", help=f"of {', '.join(names)}")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks.gpu: torch finds no CUDA device; run it on a machine with a GPU", file=sys.stderr)
        return 2
    chosen = [item for item in COMPARISONS if not options.only or item.name in options.only]
    lacking = {item.name: missing(item, torch.cuda.device_count()) for item in chosen}
    runnable = [item for item in chosen if not lacking[item.name]]
    with tempfile.TemporaryDirectory(prefix="benchmarks-graphs-") as graphs:
        schedule = Schedule(options.rounds, warm_up=3, steps=10, graphs=graphs)
        results = run(runnable, schedule)
    rows = list(zip(runnable, results, strict=True))
    utilization = {item.name: {} if result.failure else mfu(item, result) for item, result in rows}
    if options.json:
        about = {**machine(), "card": torch.cuda.get_device_name()}
        found = [{**result.to_json(), "mfu": utilization[result.name]} for result in results]
        not_run = {name: needs for name, needs in lacking.items() if needs}
        print(json.dumps({"machine": about, "rows": found, "not_run": not_run}))
    else:
        show(results, schedule)
        for result in results:
            for side, share in utilization[result.name].items():
                speed = result.tokens / statistics.median(getattr(result, side))
                text = f"{share:.1%}" if share else "unknown: no peak on record for this card"
                print(f"{result.name}, {side}: {speed:,.0f} tokens/s, MFU {text}")
        for name, needs in lacking.items():
            if needs:
                print(f"{name}: not run, needs {needs}")
    return int(any(result.status == "failed" for result in results))


def mfu(comparison: TrainingComparison, result: Result) -> dict[str, float | None]:
    """Model FLOPs utilization of each side, of all its GPUs; None for a card of unknown peak FLOP/s."""
    arguments = ["--workload", comparison.workload, "--device", comparison.device]
    profile = ours.make_profile(ours.parser().parse_args(arguments), 1)
    peak = device.resolve(comparison.device).peak(comparison.precision)
    flops = flops_per_token(profile) * result.tokens
    return {
        side: peak and flops / (statistics.median(seconds) * peak * comparison.processes)
        for side, seconds in (("ours", result.ours), ("peer", result.peer))
    }


if __name__ == "__main__":
    sys.exit(main())
