"""Compare ring attention over two devices, or one rank's blocks of it, with attention on one device.

Runs forward and backward of causal attention over one sequence. The processes of both sides stay alive and run alternately. The
ideal ratio is 1.0, without communication and merging: on a CPU, two processes with one thread each take as long as one with two
threads; two GPUs take half as long as one. The single device is timed with the kernel of the ring's blocks and with torch's
scaled_dot_product_attention, and the faster one counts.

The blocks of the first of so many ranks, without communication, need one device. Their ideal is the time of the full sequence,
divided by the ranks. Rows of `benchmarks.parallel` and `benchmarks.gpu`.
"""

import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness.processes import ScriptError
from benchmarks.harness.timing import alternate
from benchmarks.harness.workload import DTYPES
from benchmarks.harness.zigzag import zigzag_merge, zigzag_split
from modeling.check_device.kernel_errors import ring_share
from parallel import device as devices
from parallel.attention import kernels
from parallel.attention.attention import attention
from parallel.device import Device
from parallel.mesh import Axis, Mesh
from tests.ports import free_port

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
    """Processes that compute workloads together, each with its share of the sequence and its own device.

    Args:
        part: "ring"; "blocks": those of the first of `blocks` ranks, without communication; "full": attention on one device.
        blocks: number of ranks, if the outputs of the first one are compared; 1: those of all.
        share: of the measured seconds that counts.
    """

    def __init__(
        self,
        ranks: int,
        threads: int,
        device: str = "cpu",
        part: str = "ring",
        blocks: int = 1,
        share: float = 1,
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        port = free_port()
        self.share = share
        self.connections: list[Connection] = []
        for rank in range(ranks):
            connection, remote = context.Pipe()
            arguments = remote, rank, ranks, threads, port, device, part, blocks
            with mock.patch.dict(os.environ, devices.KINDS[device].environment):
                context.Process(target=_serve, args=arguments, daemon=True).start()
            self.connections.append(connection)

    def _request(self, result: str, workload: Workload) -> list[Any]:
        try:
            for connection in self.connections:
                connection.send((result, workload))
            return [connection.recv() for connection in self.connections]
        except (EOFError, OSError):
            raise ScriptError("ring_attention: a process exited; its error is on standard error") from None

    def outputs(self, workload: Workload) -> list[Tensor]:
        """out, dq, dk, dv of the complete sequence, or out and dq of the first rank; also warms up."""
        shards = [[torch.from_numpy(x) for x in rank] for rank in self._request("outputs", workload)]
        return [zigzag_merge(tensors, 2) for tensors in zip(*shards, strict=True)]

    def seconds(self, workload: Workload) -> float:
        """Seconds of one forward and backward on the slowest rank, times the share that counts."""
        return self.share * max(self._request("seconds", workload))


def preload() -> None:
    """Let the processes of groups fork from one that has imported this module but used no device."""
    multiprocessing.set_forkserver_preload([__spec__.name])


def make_sides(device: str, blocks: int | None = None) -> dict[str, Group]:
    """Ours and the peer on one device; on a CPU, both have the same number of threads.

    Args:
        blocks: for the blocks of the first of so many ranks, instead of a ring of RANKS.
    """
    if blocks:
        ours, peer = Group(1, 1, device, "blocks", blocks), Group(1, 1, device, "full", blocks, 1 / blocks)
    else:
        # With one device instead of RANKS, the ideal is the time divided by RANKS.
        share = 1 if device == "cpu" else 1 / RANKS
        ours, peer = Group(RANKS, 1, device), Group(1, RANKS, device, "full", share=share)
    return {"ours": ours, "peer": peer}


def _serve(
    connection: Connection, rank: int, ranks: int, threads: int, port: int, kind: str, part: str, blocks: int
) -> None:
    torch.set_num_threads(threads)
    device = devices.resolve(kind)
    local = device.set_current(rank)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
    device.start_process_group(local)
    axis = Mesh(context=ranks, supports_reduction=device.supports_reduction).context
    prepared, calls = None, []
    while True:
        try:
            result, workload = connection.recv()
        except EOFError:
            return  # the parent has closed the connection
        if workload != prepared:  # long sequences take the host seconds
            if part == "blocks":
                calls = [_blocks(workload, blocks, local)]
            else:
                calls = _attentions(workload, axis, device, local, part)
            prepared = workload
        seconds: list[float] = []
        outputs: Sequence[Tensor] = []
        for call in calls:
            dist.barrier()
            device.synchronize()
            begin = time.perf_counter()
            tensors = call()
            device.synchronize()
            seconds.append(time.perf_counter() - begin)
            outputs = outputs or tensors
        if result == "seconds":
            connection.send(min(seconds))
        else:
            if part == "full" and blocks > 1:
                outputs = [zigzag_split(x, blocks, 0, 2) for x in outputs[:2]]
            connection.send([x.detach().float().cpu().numpy() for x in outputs])


Call = Callable[[], Sequence[Tensor]]  # returns the output and gradients


def _attentions(workload: Workload, axis: Axis, device: Device, local: torch.device, part: str) -> list[Call]:
    """Forward and backward of a rank's attention, with each of the kernels to choose from."""
    *inputs, grad = (zigzag_split(x, axis.size, axis.rank, 2).to(local) for x in workload.tensors())
    inputs = [x.requires_grad_() for x in inputs]

    def call(attend: Callable[..., Tensor]) -> Sequence[Tensor]:
        out = attend(*inputs)
        return [out, *torch.autograd.grad(out, inputs, grad)]

    if part == "ring":
        return [partial(call, partial(attention, axis=axis))]
    own = partial(attention, kernel=kernels.default_kernel(inputs[0]))
    library = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    # In float32, GPUs have no fused kernel with grouped KV heads, and the fallback holds all scores.
    fused = device.synchronous or workload.precision != "float32"
    return [partial(call, attend) for attend in (own, library)[: 1 + fused]]


def _blocks(workload: Workload, ranks: int, local: torch.device) -> Call:
    """What the first of these ranks computes, with the keys and values of all ranks on its device."""
    q, k, v, grad = workload.tensors()
    q, grad = (zigzag_split(x, ranks, 0, 2).to(local) for x in (q, grad))
    keys, values = ([zigzag_split(x, ranks, rank, 2).to(local) for rank in range(ranks)] for x in (k, v))
    return lambda: ring_share(0, q, keys, values, grad)[:2]


def compare(
    sides: Mapping[str, Group],
    workload: Workload,
    rounds: int,
    before_turn: Callable[[str], object] = lambda side: None,
) -> tuple[float, dict[str, list[float]]]:
    """Compare two groups; returns the first one's largest relative output error and each side's seconds."""
    warmed = {side: partial(group.outputs, workload) for side, group in sides.items()}
    outputs = alternate(warmed, 1, before_turn)
    errors = [
        relative_error(*pair) for pair in zip(*(results[0] for results in outputs.values()), strict=True)
    ]
    error = torch.tensor(errors).max().item()  # NaN if one is
    timed = {side: partial(group.seconds, workload) for side, group in sides.items()}
    return error, alternate(timed, rounds, before_turn)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Relative norm of the difference."""
    return ((actual - expected).norm() / expected.norm()).item()
