"""CPU cores and memory that this process may use."""

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
