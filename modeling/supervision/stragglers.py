"""Straggler detection: which rank slows the others down.

In a synchronous step all ranks take equally long; they differ in how long they compute and how long they wait. Each rank adds
the compute time of its last finished step to the all-reduce of step statistics, 4 bytes per rank: forward and backward without
the time this process waited in collectives outside compiled graphs. On an accelerator it is measured by events in the stream,
which include the stream's collectives: a slow rank slows its tensor, context and pipeline neighbours equally, and stands out
only among data ranks. Rank r is a straggler if over WINDOW steps

    median of its compute time > FACTOR · median of all ranks' medians,  and exceeds it by more than MARGIN
"""

from __future__ import annotations

import os
import socket
import statistics
from collections import deque

import torch.distributed as dist

from parallel.mesh import Mesh

FACTOR = 1.5
MARGIN = 0.02  # seconds; smaller differences are noise
WINDOW = 20
QUIET_STEPS = 200  # between warnings
MAX_NAME_LENGTH = 64  # characters


class Stragglers:
    """Collects each rank's compute time on the leading rank; `nodes`: name of each rank's node."""

    def __init__(self, nodes: list[str]) -> None:
        self._nodes = nodes
        self._seconds = [deque[float](maxlen=WINDOW) for _ in nodes]
        self._quiet_until = 0

    def update(self, step: int, rank_seconds: list[float]) -> str:
        """Add a step's compute time of each rank; returns a warning if one is due, else an empty string."""
        for window, seconds in zip(self._seconds, rank_seconds, strict=True):
            window.append(seconds)
        if step < self._quiet_until or len(self._seconds[0]) < WINDOW or len(rank_seconds) == 1:
            return ""
        medians = [statistics.median(window) for window in self._seconds]
        typical, slowest = statistics.median_low(medians), max(medians)
        if slowest <= max(FACTOR * typical, typical + MARGIN):
            return ""
        self._quiet_until = step + QUIET_STEPS
        rank = medians.index(slowest)
        return (
            f"rank {rank} on {self._nodes[rank]} is a straggler: {slowest:.3f} s of compute per step; "
            f"median of all ranks: {typical:.3f} s"
        )


def node_name() -> str:
    """This machine's name: Slurm's if started by Slurm."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def node_names(mesh: Mesh) -> list[str]:
    """Name of each rank's node; a collective over all ranks."""
    name = node_name()[:MAX_NAME_LENGTH]
    if mesh.host is None:
        return [name]
    names: list[str | None] = [None] * mesh.size
    dist.all_gather_object(names, name, group=mesh.host)
    return [str(name) for name in names]
