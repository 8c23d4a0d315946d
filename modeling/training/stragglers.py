"""Which rank holds the others up.

In a synchronous step all ranks take equally long; what differs is how much of it a rank works and how much it waits for others.
Each tells the seconds of its own work (the step but for the time in collectives that this process waited for; inside
compiled graphs and on accelerators, whose queues run on, only waits of the host count), in the one sum at the end of a step
that the loss needs anyway: 8 bytes a rank. Rank r is a straggler where over WINDOW steps

    median of its work > FACTOR · median of all ranks' medians,  and by more than MARGIN
"""

from __future__ import annotations

import os
import socket
import statistics
from collections import deque

import torch
import torch.distributed as dist

FACTOR = 1.5
MARGIN = 0.02  # seconds, below which it is noise
WINDOW = 20
AGAIN = 200  # steps before a straggler is named again
LONGEST = 64  # bytes of a node's name


class Stragglers:
    """Of the leading rank; `nodes` are the names of each rank's node."""

    def __init__(self, nodes: list[str]) -> None:
        self._nodes = nodes
        self._seconds = [deque[float](maxlen=WINDOW) for _ in nodes]
        self._quiet_until = 0

    def watch(self, step: int, seconds: list[float]) -> str:
        """Take in each rank's seconds of a step; a warning where one is due, else nothing."""
        for kept, now in zip(self._seconds, seconds, strict=True):
            kept.append(now)
        if step < self._quiet_until or len(self._seconds[0]) < WINDOW or len(seconds) == 1:
            return ""
        medians = [statistics.median(kept) for kept in self._seconds]
        usual, worst = statistics.median_low(medians), max(medians)
        if worst <= max(FACTOR * usual, usual + MARGIN):
            return ""
        self._quiet_until = step + AGAIN
        rank = medians.index(worst)
        return f"rank {rank} on {self._nodes[rank]} holds the others up: {worst:.3f} s of work a step; the median: {usual:.3f} s"


def node_name() -> str:
    """This machine's, as Slurm has it where Slurm runs this."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def node_names() -> list[str]:
    """The name of each rank's node, in the order of the ranks; all ranks call it."""
    name = node_name()[:LONGEST]
    if not dist.is_initialized():
        return [name]
    names: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(names, name)
    return [str(each) for each in names]


def one_hot(rank: int, size: int, value: float) -> torch.Tensor:
    """(size) zeros but for this rank's value: summed over ranks, every rank's."""
    found = torch.zeros(size, dtype=torch.float64)
    found[rank] = value
    return found
