"""Compare a 1B Llama on one GPU (bf16, compiled, sequence 8192) with plain torch: tokens/s and MFU.

The peer is a plain torch Llama whose loss is compiled as one graph. MFU counts 6 FLOPs per multiply-add of the forward pass,
causal attention as half of the full square, against the card's dense peak. Exits with 2 without a CUDA device.
"""

import json
import statistics
import sys
import tempfile

import torch

from benchmarks.harness import ours
from benchmarks.harness.comparisons import Result, Schedule, TrainingComparison
from benchmarks.harness.report import machine, run, show
from benchmarks.harness.timing import make_parser
from modeling.models.flops import flops_per_token
from parallel import device

COMPARISON = TrainingComparison(
    *("gpu", "1B Llama, bf16, compiled", "plain torch, compiled", 1.05, ("plain",)),
    processes=1,
    precision="bf16",
    compiled=True,
    workload="1b",
    device="cuda",
)


def main() -> int:
    parser = make_parser(__doc__, rounds=3)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks.gpu: torch finds no CUDA device; run it on a machine with a GPU", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="benchmarks-graphs-") as graphs:
        schedule = Schedule(options.rounds, warm_up=3, steps=10, graphs=graphs)
        (result,) = run([COMPARISON], schedule)
    utilization = {} if result.failure else mfu(result)
    if options.json:
        about = {**machine(), "card": torch.cuda.get_device_name()}
        print(json.dumps({"machine": about, "row": result.to_json(), "mfu": utilization}))
    else:
        show([result], schedule)
        for side, share in utilization.items():
            speed = result.tokens / statistics.median(getattr(result, side))
            text = f"{share:.1%}" if share else "unknown: no peak on record for this card"
            print(f"{side}: {speed:,.0f} tokens/s, MFU {text}")
    return int(result.status == "failed")


def mfu(result: Result) -> dict[str, float | None]:
    """Model FLOPs utilization of each side; None for a card of unknown peak FLOP/s."""
    arguments = ["--workload", COMPARISON.workload, "--device", COMPARISON.device]
    profile = ours.make_profile(ours.parser().parse_args(arguments), 1)
    peak = device.resolve(COMPARISON.device).peak(COMPARISON.precision)
    flops = flops_per_token(profile) * result.tokens
    return {
        side: peak and flops / (statistics.median(seconds) * peak)
        for side, seconds in (("ours", result.ours), ("peer", result.peer))
    }


if __name__ == "__main__":
    sys.exit(main())
