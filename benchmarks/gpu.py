"""One GPU: a 1B Llama in bf16, compiled, sequence 8192: `python -m benchmarks.gpu [--rounds N] [--json]`

Tokens/s and MFU of ours beside a plain torch Llama, compiled as a whole, on the same card, run in turns as in
`benchmarks.parallel`. MFU counts 6 FLOPs a multiply-add of the forward pass, causal attention at half its square, against
the card's dense peak. Without a CUDA device it says so and exits with 2.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile

import torch

from benchmarks import ours
from benchmarks.report import machine, show, sit
from benchmarks.rows import Plan, Result, Training
from modeling.models.flops import flops_per_token
from parallel import device

ROW = Training(
    "gpu",
    "1B Llama, bf16, compiled",
    "plain torch, compiled",
    ours=(),
    peer=("plain",),
    target=1.05,
    processes=1,
    precision="bf16",
    compiled=True,
    work="1b",
    device="cuda",
)
MFU = 0.50  # at least


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu", description=__doc__.splitlines()[0].split(": `")[0]
    )
    parser.add_argument("--rounds", type=int, default=3, help="of each side (default: 3)")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of the table")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(
            "benchmarks.gpu: torch sees no CUDA device here, so there is nothing to measure", file=sys.stderr
        )
        return 2
    with tempfile.TemporaryDirectory(prefix="benchmarks-graphs-") as graphs:
        plan = Plan(options.rounds, warm_up=3, steps=10, graphs=graphs)
        (result,) = sit([ROW], plan)
    utilization = {} if result.failure else mfu(result)
    if options.json:
        card = torch.cuda.get_device_name()
        print(
            json.dumps({"machine": {**machine(), "card": card}, "row": result.document(), "mfu": utilization})
        )
    else:
        show([result], f"medians of {plan.steps} steps in {plan.rounds} rounds")
        for side, share in utilization.items():
            speed = result.tokens / getattr(result, f"{side}_seconds")
            print(
                f"{side}: {speed:,.0f} tokens/s, MFU "
                + (f"{share:.1%}" if share else "unknown: no peak on record")
            )
    return int(result.status == "failed")


def mfu(result: Result) -> dict[str, float | None]:
    """Share of the card's peak FLOP/s that each side's model FLOPs are; None where the peak is not known."""
    profile = ours.profile(ours.parser().parse_args(["--work", ROW.work, "--device", ROW.device]), 1)
    peak = device.resolve(ROW.device).peak(ROW.precision)
    flops = flops_per_token(profile) * result.tokens
    return {side: peak and flops / (getattr(result, f"{side}_seconds") * peak) for side in ("ours", "peer")}


if __name__ == "__main__":
    sys.exit(main())
