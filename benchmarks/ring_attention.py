"""Ring attention over two processes of one thread against one process of two threads: `python -m benchmarks.ring_attention`

Forward and backward of causal attention, 8 query and 2 KV heads of size 32, one sequence. Both sides stay alive and take
turns, so that whatever else the machine does meets both; medians are compared. Ideal is 1.0: the same work on the same
cores with nothing to send or merge. Outputs and gradients of both must agree, else the exit code is 1.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import statistics
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch import Tensor

from parallel import device
from parallel.attention.attention import attention
from parallel.mesh import Mesh
from tests.parallel.attention.reference import zigzag_merge, zigzag_split

RANKS = 2
TARGET = 0.85
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
TOLERANCES = {"float32": 1e-5, "bf16": 2e-2}


@dataclass(frozen=True)
class Work:
    """One causal sequence."""

    tokens: int
    precision: str
    n: int = 8
    k: int = 2
    d: int = 32

    def tensors(self) -> list[Tensor]:
        """q, k, v and the output's gradient, (1, heads, tokens, d)."""
        draw = torch.Generator().manual_seed(0)
        shapes = [(1, heads, self.tokens, self.d) for heads in (self.n, self.k, self.k, self.n)]
        return [torch.randn(shape, generator=draw).to(DTYPES[self.precision]) for shape in shapes]


class Side:
    """Processes that together do the work when asked."""

    def __init__(self, ranks: int, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.connections: list[Connection] = []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            context.Process(target=_serve, args=(theirs, rank, ranks, threads, port), daemon=True).start()
            self.connections.append(ours)

    def _ask(self, question: tuple[str, Work]) -> list:
        for connection in self.connections:
            connection.send(question)
        return [connection.recv() for connection in self.connections]

    def results(self, work: Work) -> list[Tensor]:
        """out, dq, dk, dv of the whole sequence; also warms up."""
        parts = [[torch.from_numpy(x) for x in part] for part in self._ask(("results", work))]
        return [zigzag_merge(list(shards), 2) for shards in zip(*parts, strict=True)]

    def seconds(self, work: Work) -> float:
        """Of one forward and backward, on the slower rank."""
        return max(self._ask(("seconds", work)))


def _serve(connection: Connection, rank: int, ranks: int, threads: int, port: int) -> None:
    torch.set_num_threads(threads)
    device.CPU.set_current()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    axis = Mesh(context=ranks).context
    while True:
        try:
            question, work = connection.recv()
        except EOFError:
            return  # the benchmark is over
        *inputs, grad = (zigzag_split(x, axis.size, axis.rank, 2) for x in work.tensors())
        inputs = [x.requires_grad_() for x in inputs]
        dist.barrier()
        begun = time.perf_counter()
        out = attention(*inputs, axis)
        gradients = torch.autograd.grad(out, inputs, grad)
        seconds = time.perf_counter() - begun
        if question == "seconds":
            connection.send(seconds)
        else:
            connection.send([x.detach().float().numpy() for x in (out, *gradients)])


def error(found: Tensor, expected: Tensor) -> float:
    """Relative norm of the difference."""
    return ((found - expected).norm() / expected.norm()).item()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--precision", choices=DTYPES, default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    one, ring = Side(1, RANKS), Side(RANKS, 1)
    agree = True
    for tokens in options.tokens:
        work = Work(tokens, options.precision)
        worst = max(map(error, ring.results(work), one.results(work)))
        agree &= worst < TOLERANCES[work.precision]
        times = [(one.seconds(work), ring.seconds(work)) for _ in range(options.rounds)]
        alone, together = (statistics.median(side) for side in zip(*times, strict=True))
        print(
            f"{tokens} tokens, {work.precision}: one process {alone:.3f} s, ring of {RANKS} {together:.3f} s, "
            f"ratio {alone / together:.3f} of ideal (at least {TARGET}); largest relative difference {worst:.1e}",
            flush=True,
        )
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
