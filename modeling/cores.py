"""Number of CPU cores that this process may use."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Number of cores in this process's affinity mask, which Slurm and containers restrict.

    On systems without such masks, all cores.
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
