"""Memory of the vocabulary-parallel loss, fused with the output projection and not: `python -m benchmarks.loss_memory`

Two processes, the vocabulary split over them, forward and backward. The fused loss (`linear_cross_entropy`) never holds full
logits; the other is a projection followed by `vocab_parallel_cross_entropy`. A process for each, so that its peak of resident
memory is the loss's own; the losses and the gradients of hidden states must agree, else the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import sys
import time

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.sitting import Script, run
from parallel import Mesh, linear_cross_entropy, vocab_parallel_cross_entropy
from parallel.collectives import copy
from parallel.mesh import Axis

RANKS = 2
TOLERANCE = 1e-5
VARIANTS = ("fused", "unfused")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.loss_memory", description=__doc__.splitlines()[0].split(":")[0]
    )
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument(
        "--variant", choices=VARIANTS, help="run this one, in a process that was launched for it"
    )
    options = parser.parse_args()
    if options.variant:
        measure(options)
        return 0
    sizes = [f"--{name}={getattr(options, name)}" for name in ("tokens", "hidden", "vocabulary")]
    found = {
        variant: run(Script("loss_memory", (f"--variant={variant}",), RANKS), sizes) for variant in VARIANTS
    }
    agree = all(
        math.isclose(one, other, rel_tol=TOLERANCE)
        for one, other in zip(*(measured.losses for measured in found.values()), strict=True)
    )
    logits = options.tokens * options.vocabulary // RANKS * 4
    table = Table(
        title=f"{options.tokens} tokens, hidden {options.hidden}, vocabulary {options.vocabulary} over {RANKS} processes; "
        f"a process's logits are {logits / 2**20:.0f} MiB in float32"
    )
    for heading in ("loss", "peak memory on top, MiB", "seconds"):
        table.add_column(heading, justify="right")
    for variant, measured in found.items():
        table.add_row(variant, f"{measured.peak_bytes / 2**20:.0f}", f"{measured.step:.2f}")
    console = Console()
    console.print(table)
    console.print(f"losses and gradients {'agree' if agree else 'DIFFER'} within {TOLERANCE}")
    return 0 if agree else 1


def measure(options: argparse.Namespace) -> None:
    """Prints the loss and the norm of its gradient, the peak of memory on top of the inputs, and the time."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    axis = Mesh(tensor=RANKS).tensor
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(options.tokens, options.hidden, generator=generator).requires_grad_()
    rows = -(-options.vocabulary // RANKS)
    weight = torch.randn(rows, options.hidden, generator=generator).mul_(0.02).requires_grad_()
    targets = torch.randint(options.vocabulary, (options.tokens,), generator=generator)
    dist.barrier()
    before = resident_bytes()
    begun = time.perf_counter()
    compute = {"fused": fused, "unfused": unfused}[options.variant]
    loss = compute(x, weight, targets, axis, options.vocabulary)
    loss.backward()
    seconds = time.perf_counter() - begun
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    if dist.get_rank() == 0:
        losses = [loss.item(), x.grad.norm().item()]
        print(json.dumps({"seconds": [seconds], "losses": losses, "peak_bytes": peak}))
    dist.destroy_process_group()


def fused(x: Tensor, weight: Tensor, targets: Tensor, axis: Axis, vocabulary: int) -> Tensor:
    first = torch.tensor(axis.rank * weight.shape[0])
    return linear_cross_entropy(x, weight, targets, axis, first=first, vocabulary=vocabulary)


def unfused(x: Tensor, weight: Tensor, targets: Tensor, axis: Axis, vocabulary: int) -> Tensor:
    first = torch.tensor(axis.rank * weight.shape[0])
    logits = copy(x, axis) @ weight.t()
    return vocab_parallel_cross_entropy(logits, targets, axis, first=first, vocabulary=vocabulary).sum()


def resident_bytes() -> int:
    """Of this process, now."""
    import psutil

    return psutil.Process().memory_info().rss


if __name__ == "__main__":
    sys.exit(main())
