"""Measure peak memory of the vocabulary-parallel loss, fused with the projection, and of torch's.

Two processes share the vocabulary and run forward and backward. `linear_cross_entropy` never holds complete logits; torch's
is a projection followed by `loss_parallel`. Each variant runs in its own processes, so that the peak of resident memory is that
of the loss. Losses and gradients of hidden states must agree; otherwise the exit code is 1.
"""

import argparse
import json
import resource
import sys

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel

from benchmarks.harness.processes import Script, largest_difference, measure_script
from benchmarks.harness.results import Results
from benchmarks.harness.timing import make_parser, print_table, seconds
from parallel import Mesh, linear_cross_entropy
from parallel.collectives import copy

RANKS = 2
TOKENS, HIDDEN, VOCABULARY = 4096, 512, 32768
TOLERANCE = 1e-5
VARIANTS = ("fused", "torch")


def main() -> int:
    parser = make_parser(__doc__, out="loss_memory")
    # Set for the measured processes.
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.variant:
        measure(options.variant)
        return 0
    measured, results = {}, Results(options.out)
    for variant in VARIANTS:
        script = Script("operators.loss_memory", (f"--variant={variant}",), RANKS)
        measured[variant] = run = measure_script(script)
        results.add(variant, peak_bytes=run.peak_bytes, seconds=run.median_seconds())
    agree = largest_difference(list(measured.values())) <= TOLERANCE
    logits = TOKENS * VOCABULARY // RANKS * 4
    print_table(
        f"{TOKENS} tokens, hidden {HIDDEN}, vocabulary {VOCABULARY} over {RANKS} processes; "
        f"logits of a process: {logits / 2**20:.0f} MiB in float32",
        ("loss", "peak memory above the inputs, MiB", "seconds"),
        [
            (variant, f"{run.peak_bytes / 2**20:.0f}", f"{run.median_seconds():.2f}")
            for variant, run in measured.items()
        ],
    )
    print(f"losses and gradients {'agree' if agree else 'DIFFER'} within {TOLERANCE}")
    return 0 if agree else 1


def measure(variant: str) -> None:
    """Print the loss and its gradient's norm, the peak of memory above the inputs, and the time."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    axis = Mesh(tensor=RANKS).tensor
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).requires_grad_()
    rows = -(-VOCABULARY // RANKS)
    weight = torch.randn(rows, HIDDEN, generator=generator).mul_(0.02).requires_grad_()
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    shard = {"first": torch.tensor(axis.rank * rows), "vocabulary": VOCABULARY}
    devices = init_device_mesh("cpu", (RANKS,))
    losses: list[Tensor] = []

    def compute() -> None:
        if variant == "fused":
            loss = linear_cross_entropy(x, weight, targets, axis, **shard)
            loss.backward()
        else:
            with loss_parallel():
                # no local reference: logits must be freed before the backward pass
                loss = F.cross_entropy(sharded_logits(), targets, reduction="sum")
                loss.backward()
        losses.append(loss)

    def sharded_logits() -> DTensor:
        return DTensor.from_local(copy(x, axis) @ weight.t(), devices, [Shard(1)])

    dist.barrier()
    before = psutil.Process().memory_info().rss
    taken = seconds(compute)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    if dist.get_rank() == 0:
        assert x.grad is not None
        found = [float(losses[0]), x.grad.norm().item()]
        print(json.dumps({"seconds": [taken], "losses": found, "peak_bytes": peak}))
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
