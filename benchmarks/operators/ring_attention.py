"""Compare ring attention over two devices with the same attention on one.

Runs forward and backward of causal attention over one sequence. The processes of both sides stay alive and run alternately. The
ideal ratio is 1.0, without communication and merging: on a CPU, two processes with one thread each take as long as one with two
threads; two GPUs take half as long as one. Outputs and gradients must agree; otherwise the exit code is 1.
"""

import multiprocessing
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness.processes import ScriptError
from benchmarks.harness.timing import alternate, make_parser
from benchmarks.harness.workload import DTYPES
from parallel import device as devices
from parallel.attention.attention import attention
from parallel.mesh import Mesh
from tests.parallel.attention.reference import zigzag_merge, zigzag_split

RANKS = 2
TARGET = 0.85
TOLERANCES = {"float32": 1e-5, "bf16": 2e-2}


class Heads(NamedTuple):
    """Query heads, KV heads, and their size."""

    query: int
    kv: int
    size: int


SMALL_HEADS = Heads(8, 2, 32)
LLAMA_8B_HEADS = Heads(32, 8, 128)


@dataclass(frozen=True)
class Workload:
    """Attention over one causal sequence."""

    tokens: int
    precision: str
    heads: Heads = SMALL_HEADS

    def tensors(self) -> list[Tensor]:
        """q, k, v and the output's gradient, each (1, heads, s, d)."""
        generator, (query, kv, size) = torch.Generator().manual_seed(0), self.heads
        shapes = [(1, heads, self.tokens, size) for heads in (query, kv, kv, query)]
        return [torch.randn(shape, generator=generator).to(DTYPES[self.precision]) for shape in shapes]


class Group:
    """Processes that compute workloads together, each with its share of the sequence and its own device."""

    def __init__(self, ranks: int, threads: int, device: str = "cpu") -> None:
        context = multiprocessing.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.connections: list[Connection] = []
        for rank in range(ranks):
            connection, remote = context.Pipe()
            arguments = remote, rank, ranks, threads, port, device
            context.Process(target=_serve, args=arguments, daemon=True).start()
            self.connections.append(connection)

    def _request(self, result: str, workload: Workload) -> list:
        try:
            for connection in self.connections:
                connection.send((result, workload))
            return [connection.recv() for connection in self.connections]
        except (EOFError, OSError):
            raise ScriptError("ring_attention: a process exited; its error is on standard error") from None

    def outputs(self, workload: Workload) -> list[Tensor]:
        """out, dq, dk, dv of the complete sequence; also warms up."""
        shards = [[torch.from_numpy(x) for x in rank] for rank in self._request("outputs", workload)]
        return [zigzag_merge(list(tensors), 2) for tensors in zip(*shards, strict=True)]

    def seconds(self, workload: Workload) -> float:
        """Seconds of one forward and backward on the slowest rank."""
        return max(self._request("seconds", workload))


def make_sides(device: str) -> dict[str, Group]:
    """Ours on RANKS devices and the peer on one; on a CPU both have the same number of threads."""
    return {"ours": Group(RANKS, 1, device), "peer": Group(1, RANKS, device)}


def _serve(connection: Connection, rank: int, ranks: int, threads: int, port: int, kind: str) -> None:
    torch.set_num_threads(threads)
    device = devices.resolve(kind)
    local = device.set_current(rank)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
    device.start_process_group(local)
    axis = Mesh(context=ranks, supports_reduction=device.supports_reduction).context
    # The kernel of the ring's blocks; by default, one GPU would choose among several.
    kernel = None if ranks > 1 or kind == "cpu" else device.attention_kernel
    prepared = None
    while True:
        try:
            result, workload = connection.recv()
        except EOFError:
            return  # the parent has closed the connection
        if workload != prepared:  # long sequences take the host seconds
            tensors = workload.tensors()
            *inputs, grad = (zigzag_split(x, axis.size, axis.rank, 2).to(local) for x in tensors)
            inputs, prepared = [x.requires_grad_() for x in inputs], workload
            del tensors
        dist.barrier()
        device.synchronize()
        begin = time.perf_counter()
        out = attention(*inputs, axis, kernel=kernel)
        gradients = torch.autograd.grad(out, inputs, grad)
        device.synchronize()
        seconds = time.perf_counter() - begin
        if result == "seconds":
            # With one device instead of RANKS, the ideal is the time divided by RANKS.
            connection.send(seconds / (RANKS // ranks if kind != "cpu" else 1))
        else:
            connection.send([x.detach().float().cpu().numpy() for x in (out, *gradients)])


def compare(
    sides: Mapping[str, Group],
    workload: Workload,
    rounds: int,
    before_turn: Callable[[str], object] = lambda side: None,
) -> tuple[float, dict[str, list[float]]]:
    """Compare two groups; returns the first one's largest relative output error and each side's seconds."""
    outputs = alternate(
        {side: lambda group=group: group.outputs(workload) for side, group in sides.items()}, 1, before_turn
    )
    errors = list(map(relative_error, *(results[0] for results in outputs.values())))
    error = torch.tensor(errors).max().item()  # NaN if one is
    timed = {side: lambda group=group: group.seconds(workload) for side, group in sides.items()}
    return error, alternate(timed, rounds, before_turn)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Relative norm of the difference."""
    return ((actual - expected).norm() / expected.norm()).item()


def main() -> int:
    parser = make_parser(__doc__, rounds=5)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--precision", choices=DTYPES, default="float32")
    parser.add_argument("--device", choices=sorted(devices.KINDS), default="cpu")
    options = parser.parse_args()
    sides = make_sides(options.device)
    agree = True
    for tokens in options.tokens:
        heads = SMALL_HEADS if options.device == "cpu" else LLAMA_8B_HEADS
        error, seconds = compare(sides, Workload(tokens, options.precision, heads), options.rounds)
        agree &= error < TOLERANCES[options.precision]
        ring, single = (statistics.median(seconds[side]) for side in sides)
        print(
            f"{tokens} tokens, {options.precision}: ideal {single:.3f} s, ring of {RANKS} {ring:.3f} s, "
            f"ratio {single / ring:.3f} of ideal (at least {TARGET}); largest relative difference {error:.1e}",
            flush=True,
        )
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
