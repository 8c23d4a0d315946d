"""CPU cores and memory that this process may use.

Slurm enforces a job's share of a node only if it is configured to (task/affinity, ConstrainRAMSpace): what is allotted may be
less than what is usable.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def usable_cores() -> int:
    """Number of cores in this process's affinity mask, which Slurm and containers restrict.

    On systems without such masks, all cores.
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def usable_memory() -> int:
    """Memory of this machine or, if smaller, of this process's control group, in bytes."""
    limits = [psutil.virtual_memory().total]
    for folder, name in _memory_groups():
        with suppress(OSError, ValueError):  # no such control group, or "max"
            limits.append(int((folder / name).read_text()))
    return min(limits)


def allotted_cores() -> int:
    """Number of usable cores, at most those that Slurm has allotted to this process's job."""
    return min(usable_cores(), _slurm("SLURM_CPUS_ON_NODE") or usable_cores())


def allotted_memory() -> int:
    """Usable memory, at most that of this process's Slurm job if it asked for some, in bytes."""
    megabytes = _slurm("SLURM_MEM_PER_NODE")
    megabytes = megabytes or _slurm("SLURM_MEM_PER_CPU") * _slurm("SLURM_CPUS_ON_NODE")
    return min(usable_memory(), megabytes << 20) if megabytes else usable_memory()


def _slurm(name: str) -> int:
    """A number that Slurm gives its jobs; 0, which means all of the node, if it is not set."""
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else 0


def _memory_groups() -> list[tuple[Path, str]]:
    """This process's control groups with a memory limit, of both versions, and their limit files."""
    # In a container, the root is its own group, whatever the path says.
    roots = [(CGROUPS, "memory.max"), (CGROUPS / "memory", "memory.limit_in_bytes")]
    groups = [*roots]
    with suppress(OSError):
        for line in MEMBERSHIP.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "" or "memory" in controllers.split(","):
                root, name = roots[bool(controllers)]
                group = root / path.removeprefix("/")
                groups += [(each, name) for each in (group, *group.parents) if each.is_relative_to(root)]
    return groups
